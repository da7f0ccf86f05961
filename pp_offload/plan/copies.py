"""Copies to the host and back, in numbers: what waits for what, and who holds which memory.

    copies = Copies(device, host, bounds, Moved(), Unwatched(device))
    copies.offload(saved)         # may raise MemoryError; then nothing has left
    copies.bring(saved)
    copies.poll()

Each method does what the one of the engine does that it names.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pp_offload._memory.buffers import HostBuffer, room_for
from pp_offload._transfer.outgoing import PACK_BYTES
from pp_offload._transfer.pending_reloads import MAX_ABANDONED
from pp_offload.plan.bounds import Bounds, Unwatched
from pp_offload.plan.chunks import Arrival, Block, Held, Reload, Saved
from pp_offload.plan.device import NumberDevice
from pp_offload.plan.host import HostPlaces
from pp_offload.simulate.clocks import VirtualEvent


@dataclass(slots=True)
class Pending:
    """A batch on its way to the host."""

    sources: list[Held]
    blocks: list[weakref.ref[Block]]
    nbytes: int
    offloaded: VirtualEvent


class Abandoned(NamedTuple):
    """Memory that a copy still fills, though nobody wants it."""

    memory: Reload
    reloaded: VirtualEvent


@dataclass
class Moved:
    """Totals of a rank, as those of the engine's statistics."""

    bytes_offloaded: int = 0
    bytes_reloaded: int = 0
    prefetched_reloads: int = 0
    on_demand_reloads: int = 0
    taken_back: int = 0


class Copies:
    """One rank's copies.

    Args:
        device: Where it works.
        host: Where payloads go.
        bounds: On what is on its way.
        moved: Counts what is moved.
        watch: Times the step.

    Attributes:
        reload_bytes: On the device again, or on its way there, and not used up.
    """

    def __init__(
        self,
        device: NumberDevice,
        host: HostPlaces,
        bounds: Bounds,
        moved: Moved,
        watch: Unwatched,
    ) -> None:
        self.device = device
        self.moved = moved
        self.watch = watch
        self.reload_bytes = 0
        self._host = host
        self._bounds = bounds
        self._pending: deque[Pending] = deque()
        self._unwanted: deque[Saved] = deque()
        self._abandoned: deque[Abandoned] = deque()
        self._in_flight_bytes = 0

    def drop(self, held: Held) -> None:
        """One holder less of device memory."""
        held.num_holders -= 1
        if not held.num_holders:
            self.device.memory.add(-held.nbytes)

    # To the host

    def offload(self, saved: list[Saved]) -> int:
        """As ``TransferEngine.offload``; bytes.

        Raises:
            MemoryError: The host has no room for the rest of it.
        """
        blocks = [self._place(batch, room) for batch, room in packs(saved)]
        device, nbytes = self.device, sum(one.nbytes for one in saved)
        buffers = [block.loan.buffer for block in blocks]
        device.d2h.wait_stream(device.compute)
        self._d2h_waits_for_last_users(buffers)
        sizes = [size for one in saved for size in one.sizes()]
        offloaded = self.watch.copy(sizes, to_host=True)
        offloaded_s = offloaded.time_s
        for block, buffer in zip(blocks, buffers, strict=True):
            block.offloaded_s = offloaded_s
            buffer.last_use = offloaded
            buffer.before = ()
        self.moved.bytes_offloaded += nbytes
        if offloaded_s > device.host.now_s:
            sources = [one.source for one in saved]
            for one in saved:
                one.source.num_holders += 1
                assert one.block is not None
                one.block.in_flight[one.begin] = one.source
            known = [weakref.ref(block) for block in blocks]
            self._pending.append(Pending(sources, known, nbytes, offloaded))
            self._in_flight_bytes += nbytes
        self._bounds.cap.expect(nbytes)
        self._keep_bounded(nbytes)
        self._keep_few_abandoned()
        return nbytes

    def _place(self, batch: list[Saved], room: int) -> Block:
        self.poll()
        block = Block(self._host.allocate(room))
        begin = 0
        for one in batch:
            one.block, one.begin, one.has_left = block, begin, True
            block.placed.append(one)
            begin += room_for(one.nbytes)
        return block

    def _d2h_waits_for_last_users(self, buffers: Sequence[HostBuffer]) -> None:
        """As the method of ``Copies`` of this name."""
        d2h = self.device.d2h
        for buffer in buffers:
            if buffer.last_use is not None and not buffer.last_use.query():
                d2h.wait_event(buffer.last_use)
            for event in buffer.before:
                d2h.wait_event(event)

    def _keep_bounded(self, last_bytes: int) -> None:
        """As ``InFlight.keep_bounded``."""
        cap_bytes = self._bounds.cap.nbytes
        most = max(cap_bytes, last_bytes) if cap_bytes else 0
        while self._pending:
            self.poll()
            if self._in_flight_bytes <= most:
                return
            self.watch.wait(self._pending[0].offloaded)
            self._finish()

    def _keep_few_abandoned(self) -> None:
        """As ``PendingReloads.keep_few_abandoned``."""
        while len(self._abandoned) > MAX_ABANDONED:
            memory, reloaded = self._abandoned.popleft()
            self.device.compute.wait_event(reloaded)
            self.drop(memory)

    def poll(self) -> None:
        """As the method of ``Copies`` of this name."""
        now_s = self.device.host.now_s
        while self._pending and self._pending[0].offloaded.time_s <= now_s:
            self._finish()
        while self._unwanted:
            self.give_up(self._unwanted.popleft())
        while self._abandoned and self._abandoned[0].reloaded.time_s <= now_s:
            self.drop(self._abandoned.popleft().memory)

    def _finish(self) -> None:
        pending = self._pending.popleft()
        self._in_flight_bytes -= pending.nbytes
        for ref in pending.blocks:
            block = ref()
            if block is not None:
                block.in_flight.clear()
        for source in pending.sources:
            self.drop(source)

    # To the device

    def bring(self, saved: Sequence[Saved]) -> int:
        """As the method of ``Copies`` of this name."""
        batch, sharers = self._first_of_each(saved)
        if batch:
            self._reload(batch)
        left = [one for one in sharers if not self.share(one)]
        return len(batch) + (self.bring(left) if left else 0)

    def _first_of_each(self, saved: Sequence[Saved]) -> tuple[list[Saved], list[Saved]]:
        """As the method of ``Copies`` of this name."""
        batch: list[Saved] = []
        sharers: list[Saved] = []
        chosen: set[tuple[Block | None, int]] = set()
        for one in saved:
            if one.block is None or one.begin not in one.block.shared:
                batch.append(one)
            elif (one.block, one.begin) in chosen:
                sharers.append(one)
            elif not self.share(one):
                chosen.add((one.block, one.begin))
                batch.append(one)
        return batch, sharers

    def _reload(self, saved: Sequence[Saved]) -> None:
        """As ``Copies._queue_reload``."""
        device, arrival = self.device, Arrival()
        for one in saved:
            one.arrival, one.memory = arrival, Reload(one.spec.reload_bytes)
            device.memory.add(one.spec.reload_bytes)
            self.reload_bytes += one.nbytes
            self.moved.bytes_reloaded += one.nbytes
        device.h2d.wait_stream(device.compute)
        blocks = {one.block: None for one in saved if one.block is not None}
        for block in blocks:
            device.h2d.wait_until(block.offloaded_s)
        sizes = [size for one in saved for size in one.sizes()]
        arrival.reloaded = self.watch.copy(sizes, to_host=False)
        for block in blocks:
            block.loan.buffer.last_use = arrival.reloaded

    def share(self, one: Saved) -> bool:
        """As ``PendingReloads.share``."""
        for other in one.others():
            if other.arrival is not None and other.memory is not None:
                if other.arrival.reloaded is not None:
                    one.arrival, one.memory = other.arrival, other.memory
                    other.memory.num_users += 1
                    other.memory.num_holders += 1
                    return True
        return False

    def want_no_more(self, one: Saved) -> None:
        """Nobody will ask for what came; noticed at the next :meth:`poll`."""
        self._unwanted.append(one)

    def give_up(self, one: Saved) -> None:
        """As ``PendingReloads.give_up``."""
        if one.memory is not None:
            memory, arrival, one.memory, one.arrival = one.memory, one.arrival, None, None
            memory.num_users -= 1
            if not memory.num_users:
                self.reload_bytes -= one.nbytes
                if arrival is not None and arrival.reloaded is not None and not arrival.is_there:
                    self._abandoned.append(Abandoned(memory, arrival.reloaded))
                    return
            self.drop(memory)


def packs(saved: Sequence[Saved]) -> Iterator[tuple[list[Saved], int]]:
    """As those of ``outgoing.py``: small payloads share a block."""
    batch: list[Saved] = []
    room = 0
    for one in saved:
        if batch and room + one.nbytes > PACK_BYTES:
            yield batch, room if len(batch) > 1 else batch[0].nbytes
            batch, room = [], 0
        batch.append(one)
        room += room_for(one.nbytes)
    yield batch, room if len(batch) > 1 else batch[0].nbytes
