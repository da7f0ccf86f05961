"""Numbers about one engine, exact at the moment they are asked for."""

from __future__ import annotations

from pp_offload._core.statistics import OffloadStatistics
from pp_offload._transfer.engine import TransferEngine


def collect(transfer: TransferEngine) -> OffloadStatistics:
    """The statistics of an engine."""
    with transfer.lock:
        transfer.poll()
        tiers = [tier.statistics() for tier in transfer.tiers]
        counters = transfer.counters
        return OffloadStatistics(
            bytes_offloaded=counters.bytes_offloaded,
            bytes_reloaded=counters.bytes_reloaded,
            host_bytes_in_use=sum(tier.host.in_use for tier in tiers),
            host_bytes_peak=sum(tier.host.peak for tier in tiers),
            host_bytes_reserved=sum(tier.host.reserved for tier in tiers),
            bytes_in_flight=transfer.copies.in_flight.nbytes,
            bytes_reloaded_unused=transfer.reloads.nbytes,
            live_tensors=sum(tier.num_payloads for tier in tiers),
            prefetched_reloads=counters.prefetched_reloads,
            on_demand_reloads=counters.on_demand_reloads,
            taken_back=counters.num_taken_back,
            stalled_ms=counters.stalled_ms,
            host_allocations=sum(tier.host.num_allocations for tier in tiers),
            disk_bytes_in_use=sum(tier.disk.in_use for tier in tiers),
            disk_bytes_peak=sum(tier.disk.peak for tier in tiers),
            disk_bytes_written=sum(tier.disk.written for tier in tiers),
            disk_bytes_read=sum(tier.disk.read for tier in tiers),
        )
