"""Numbers about one engine, exact at the moment they are asked for."""

from __future__ import annotations

from typing import Any

from pp_offload._core.mover import Mover
from pp_offload._transfer.statistics import OffloadStatistics


def collect(transfer: Any) -> OffloadStatistics:
    """The statistics of an engine."""
    mover: Mover = transfer.mover
    with mover.lock:
        mover.poll()
        counts, host = mover.counts, mover.tier.pool  # type: ignore[attr-defined]
        return OffloadStatistics(
            bytes_offloaded=counts.bytes_offloaded,
            bytes_reloaded=counts.bytes_reloaded,
            host_bytes_in_use=host.in_use_bytes,
            host_bytes_peak=host.peak_bytes,
            host_bytes_reserved=host.reserved_bytes,
            bytes_in_flight=mover.in_flight.nbytes,
            bytes_reloaded_unused=mover.arrived.unused_bytes,
            live_tensors=mover.arrived.num_payloads(),
            prefetched_reloads=counts.prefetched_reloads,
            on_demand_reloads=counts.on_demand_reloads,
            taken_back=counts.num_taken_back,
            stalled_ms=counts.stalled_ms,
            host_allocations=host.num_allocations,
            disk_bytes_in_use=0,
            disk_bytes_peak=0,
            disk_bytes_written=0,
            disk_bytes_read=0,
        )
