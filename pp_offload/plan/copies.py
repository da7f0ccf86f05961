"""Copies between a device and its host, in numbers; see :mod:`pp_offload._transfer.copies`.

copies = Copies(device, bounds.cap, moved, watch)
copies.copy_to_host(saved, blocks)   # they have their places
copies.copy_to_device(saved)         # from there
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pp_offload._memory.buffers import HostBuffer
from pp_offload._policy.bound import Bound
from pp_offload.plan.bounds import Unwatched
from pp_offload.plan.chunks import Arrival, Block, Saved
from pp_offload.plan.device import NumberDevice
from pp_offload.plan.in_flight import InFlight
from pp_offload.plan.pending_reloads import PendingReloads


@dataclass
class Moved:
    """Totals of a rank, as those of the engine's statistics."""

    bytes_offloaded: int = 0
    bytes_reloaded: int = 0
    prefetched_reloads: int = 0
    on_demand_reloads: int = 0
    taken_back: int = 0


class Copies:
    """Queues copies in order.

    Args:
        device: Where they run.
        cap: On bytes that are on their way to the host.
        moved: Counts what is moved.
        watch: Times the step.

    Attributes:
        device, moved, watch: See above.
        in_flight: What is on its way to the host.
        reloads: What is on the device again, or on its way there.
    """

    def __init__(self, device: NumberDevice, cap: Bound, moved: Moved, watch: Unwatched) -> None:
        self.device = device
        self.moved = moved
        self.watch = watch
        self.in_flight = InFlight(device, cap, watch)
        self.reloads = PendingReloads(device)

    # To the host

    def copy_to_host(self, saved: Sequence[Saved], blocks: Sequence[Block]) -> int:
        """Copy payloads to their places; how many bytes."""
        device, nbytes = self.device, sum([one.nbytes for one in saved])
        buffers = buffers_of(blocks)
        device.d2h.wait_stream(device.compute)
        self._d2h_waits_for_last_users(buffers)
        sizes = [size for one in saved for size in one.sizes()]
        offloaded = self.watch.copy(sizes, to_host=True)
        for block in blocks:
            block.offloaded = offloaded
        for buffer in buffers:
            buffer.last_use = offloaded
            buffer.before = ()
        self.moved.bytes_offloaded += nbytes
        self.in_flight.begin(saved, blocks, nbytes, offloaded)
        return nbytes

    def _d2h_waits_for_last_users(self, buffers: Sequence[HostBuffer]) -> None:
        d2h = self.device.d2h
        for buffer in buffers:
            if buffer.last_use is not None and not buffer.last_use.query():
                d2h.wait_event(buffer.last_use)
            for event in buffer.before:
                d2h.wait_event(event)

    # To the device

    def copy_to_device(self, saved: Sequence[Saved]) -> int:
        """Bring payloads; how many are copied, for those of the same bytes are copied once."""
        batch, sharers = self._first_of_each(saved)
        if batch:
            self._queue_reload(batch)
        left = [one for one in sharers if not self.reloads.share(one)]
        return len(batch) + (self.copy_to_device(left) if left else 0)

    def _first_of_each(self, saved: Sequence[Saved]) -> tuple[list[Saved], list[Saved]]:
        batch: list[Saved] = []
        sharers: list[Saved] = []
        chosen: set[tuple[Block | None, int]] = set()
        for one in saved:
            if one.block is None or one.begin not in one.block.shared:
                batch.append(one)
            elif (one.block, one.begin) in chosen:
                sharers.append(one)
            elif not self.reloads.share(one):
                chosen.add((one.block, one.begin))
                batch.append(one)
        return batch, sharers

    def _queue_reload(self, saved: Sequence[Saved]) -> None:
        device, arrival = self.device, Arrival()
        self.reloads.begin(saved, arrival)
        self.moved.bytes_reloaded += sum([one.nbytes for one in saved])
        device.h2d.wait_stream(device.compute)
        blocks = {one.block: None for one in saved if one.block is not None}
        for block in blocks:
            if block.offloaded is not None:
                device.h2d.wait_until(block.offloaded.time_s)
        sizes = [size for one in saved for size in one.sizes()]
        arrival.reloaded = self.watch.copy(sizes, to_host=False)
        for buffer in buffers_of(blocks):
            buffer.last_use = arrival.reloaded

    # Both

    def wait_for(self, arrival: Arrival) -> None:
        """Make compute wait for all that come together."""
        assert arrival.reloaded is not None, "its copies are queued"
        self.watch.wait(arrival.reloaded)
        arrival.is_there = True

    def poll(self) -> None:
        """Let go of what finished copies kept alive."""
        in_flight, reloads = self.in_flight, self.reloads
        if in_flight.queue:  # this is called so often that calls for nothing count
            in_flight.poll()
        if reloads.gone or reloads.abandoned:
            reloads.poll()


def buffers_of(blocks: Iterable[Block]) -> list[HostBuffer]:
    """Their host memory."""
    return [loan.buffer for block in blocks if (loan := block.loan) is not None]
