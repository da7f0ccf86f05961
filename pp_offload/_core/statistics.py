"""Numbers about one engine, exact at the moment they are asked for."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from pp_offload._common.text import size_text
from pp_offload._core.mover import Mover

COUNTERS = (
    "bytes_offloaded bytes_reloaded bytes_computed_again prefetched_reloads on_demand_reloads "
    "taken_back host_allocations disk_bytes_written disk_bytes_read".split()
)
"""Counters, which only grow while an engine lives. Other numbers are states, peaks and times."""

STATES = (
    "host_bytes_in_use host_bytes_reserved bytes_in_flight bytes_reloaded_unused live_tensors "
    "disk_bytes_in_use".split()
)


@dataclass(frozen=True)
class OffloadStatistics:
    """Counts of an engine: bytes moved since it was made, and bytes that it holds now."""

    bytes_offloaded: int
    """Bytes copied, or queued to be copied, from the device to the host or to disk."""

    bytes_reloaded: int
    """Bytes copied, or queued to be copied, from the host or from disk to the device."""

    bytes_computed_again: int
    """Bytes of saved tensors that backward computes again, so that they are neither copied nor
    kept: see :attr:`OffloadConfig.rematerialize`.
    """

    host_bytes_in_use: int
    """Host bytes that a living saved tensor needs, at rest or on the way to and from the disk."""

    host_bytes_peak: int
    """Most host bytes that were ever in use. With a disk, the most of those that stay and the most
    of those that pass through are added, though they may be at different times.
    """

    host_bytes_reserved: int
    """Host bytes taken from the system, in use or kept for reuse."""

    bytes_in_flight: int
    """Device bytes kept alive because their copy to the host or to disk has not finished."""

    bytes_reloaded_unused: int
    """Device bytes reloaded that autograd has not asked for yet."""

    live_tensors: int
    """Payloads on the host or on disk: storages or gathered views; small ones leave together."""

    prefetched_reloads: int
    """Payloads reloaded before their group's backward began."""

    on_demand_reloads: int
    """Payloads reloaded only when backward had reached them; each may have made compute wait."""

    taken_back: int
    """Payloads asked for while their copy to the host was under way, and given back without one."""

    step_ms: float | None
    """How long the last step took that was timed, until the next one began; None before. By the
    host's clock each step is; by that of a device the first two are, and two after a change.
    Without groups a step is over where no graph is left: a microbatch, or those in flight together.
    """

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
    """Bytes written, or queued to be written, to disk."""

    disk_bytes_read: int
    """Bytes read, or queued to be read, from disk."""

    def since(self, before: OffloadStatistics) -> OffloadStatistics:
        """Return the counts from ``before`` until now.

            before = manager.statistics()
            train_a_step()
            logger.log(manager.statistics().since(before).as_dict("offload/"))

        Counters are differences: bytes and payloads moved, and allocations of host memory. All
        others are as they are now; a peak is the most that ever was, also before ``before``.
        :meth:`configure` makes another engine, which counts from 0.
        """
        counted = {name: getattr(self, name) - getattr(before, name) for name in COUNTERS}
        return replace(self, **counted)

    def as_dict(self, prefix: str = "") -> dict[str, int | float]:
        """Return plain numbers by name, with a prefix such as ``"offload/"``, for a logger. None
        values, as ``stalled_ms`` on a device without a clock, are left out: 0 would be wrong.
        """
        numbers = {prefix + field.name: getattr(self, field.name) for field in fields(self)}
        return {name: number for name, number in numbers.items() if number is not None}

    def table(self) -> str:
        """Format the counts that are not 0: a line each, with bytes in a fitting unit."""
        lines = []
        for name, number in self.as_dict().items():
            text = size_text(int(number)) if "bytes" in name else f"{number:g}"
            lines += [f"{name.replace('_', ' '):<24}{text:>14}"] * bool(number)
        return "\n".join(lines)


def moved_text(statistics: OffloadStatistics) -> str:
    """Return what was moved, and what a step takes, as text."""
    disk_bytes = statistics.disk_bytes_peak
    return (
        f"{size_text(statistics.bytes_offloaded)} offloaded so far; at most "
        f"{size_text(statistics.host_bytes_peak)} in host memory"
        f"{f' and {size_text(disk_bytes)} on disk' if disk_bytes else ''} at a time"
        f"{step_text(statistics)}"
    )


def step_text(*statistics: OffloadStatistics) -> str:
    """Return the time of a step, for the end of a text; empty before a step was timed."""
    times = [each.step_ms for each in statistics if each.step_ms is not None]
    return f"; a step takes {max(times):.1f} ms" if times else ""


def collect(mover: Mover) -> OffloadStatistics:
    with mover.lock:
        mover.poll()
        pools, disk = mover.tier.pools, mover.tier.disk
        return OffloadStatistics(
            **vars(mover.counts),
            host_bytes_in_use=sum([pool.in_use_bytes for pool in pools]),
            host_bytes_peak=sum([pool.peak_bytes for pool in pools]),
            host_bytes_reserved=sum([pool.reserved_bytes for pool in pools]),
            bytes_in_flight=mover.in_flight.nbytes,
            bytes_reloaded_unused=mover.arrived.unused_bytes,
            live_tensors=sum([len(back.sizes) for back in mover.arrived.backs]),
            host_allocations=sum([pool.num_allocations for pool in pools]),
            disk_bytes_in_use=0 if disk is None else disk.in_use_bytes,
            disk_bytes_peak=0 if disk is None else disk.peak_bytes,
            disk_bytes_written=0 if disk is None else disk.written_bytes,
            disk_bytes_read=0 if disk is None else disk.read_bytes,
        )
