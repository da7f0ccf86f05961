"""Numbers about one engine, exact at the moment they are asked for."""

from __future__ import annotations

from dataclasses import dataclass

from pp_offload._transfer.engine import TransferEngine


@dataclass(frozen=True)
class OffloadStatistics:
    """What was moved since the engine was made, and what it holds now."""

    bytes_offloaded: int
    """Copied, or queued to be copied, from the device to the host or to disk."""

    bytes_reloaded: int
    """Copied, or queued to be copied, from the host or from disk to the device."""

    host_bytes_in_use: int
    """Host bytes that a living saved tensor needs, at rest or on the way to and from the disk."""

    host_bytes_peak: int
    """The most host bytes that were ever in use; with a disk tier, those passing through added."""

    host_bytes_reserved: int
    """Host bytes taken from the system, in use or kept for reuse."""

    bytes_in_flight: int
    """Device bytes kept alive because their copy to the host or to disk has not finished."""

    bytes_reloaded_unused: int
    """Device bytes reloaded that autograd has not asked for yet."""

    live_tensors: int
    """Payloads on the host or on disk: storages or gathered views. Small ones share a buffer, and
    leave together, when no living saved tensor needs any of them.
    """

    prefetched_reloads: int
    """Payloads reloaded before their group's backward began."""

    on_demand_reloads: int
    """Payloads reloaded only when backward was there; each may have made compute wait."""

    taken_back: int
    """Payloads asked for while their copy to the host was under way, and given back without one."""

    stalled_ms: float | None
    """How long compute waited for copies in the last step that was timed; None before, and on a
    device without a clock. See :attr:`OffloadConfig.max_in_flight_bytes`.
    """

    host_allocations: int
    """How often host memory was asked from the system."""

    disk_bytes_in_use: int
    """Bytes on disk that a living saved tensor needs."""

    disk_bytes_peak: int
    """The most bytes on disk that were ever in use."""

    disk_bytes_written: int
    """Written, or queued to be written."""

    disk_bytes_read: int
    """Read, or queued to be read."""


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
