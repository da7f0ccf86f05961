"""Numbers about one engine, exact at the moment they are asked for."""

from __future__ import annotations

from dataclasses import dataclass

from pp_offload.transfer import TransferEngine


@dataclass(frozen=True)
class OffloadStatistics:
    """What was moved since the engine was made, and what it holds now."""

    bytes_offloaded: int
    """Copied, or queued to be copied, from the device to the host."""

    bytes_reloaded: int
    """Copied, or queued to be copied, from the host to the device."""

    host_bytes_in_use: int
    """Host bytes that a living saved tensor needs."""

    host_bytes_peak: int
    """The most host bytes that were ever in use."""

    host_bytes_reserved: int
    """Host bytes taken from the system, in use or kept for reuse."""

    bytes_in_flight: int
    """Device bytes kept alive because their copy to the host has not finished."""

    bytes_reloaded_unused: int
    """Device bytes reloaded that autograd has not asked for yet."""

    live_tensors: int
    """Payloads on the host: storages or gathered views. Small ones share a buffer, and leave
    together, when no living saved tensor needs any of them.
    """

    prefetched_reloads: int
    """Payloads reloaded before their group's backward began."""

    on_demand_reloads: int
    """Payloads reloaded only when backward was there; each may have made compute wait."""

    taken_back: int
    """Payloads asked for while their copy to the host was under way, and given back without one."""

    consumer_wait_ms: float
    """Host time spent making the consumer wait. On an accelerator the device waits instead."""

    host_allocations: int
    """How often host memory was asked from the system."""


def collect(transfer: TransferEngine) -> OffloadStatistics:
    """The statistics of an engine."""
    transfer.poll()
    host, counters = transfer.host.statistics(), transfer.counters
    return OffloadStatistics(
        bytes_offloaded=counters.bytes_offloaded,
        bytes_reloaded=counters.bytes_reloaded,
        host_bytes_in_use=host.in_use,
        host_bytes_peak=host.peak,
        host_bytes_reserved=host.reserved,
        bytes_in_flight=transfer.in_flight_bytes,
        bytes_reloaded_unused=transfer.landed_bytes,
        live_tensors=host.num_parts,
        prefetched_reloads=counters.prefetched_reloads,
        on_demand_reloads=counters.on_demand_reloads,
        taken_back=counters.taken_back,
        consumer_wait_ms=counters.consumer_wait_ms,
        host_allocations=host.num_allocations,
    )
