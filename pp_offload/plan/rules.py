"""The engine's rules on numbers: what leaves, what waits for what, and what comes back when.

Each method does what the one of the engine does that it names; only bytes and times are moved. A
run of both on the same tapes tells whether they still agree (tests/plan).

    rules = Rules(device, HostPlaces(), Bounds(config), keys, Moved())
    rules.close(chunk, position, keeps=False)
    rules.use(chunk, payload)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from pp_offload._groups.plan import ChunkKey, GroupKey
from pp_offload._groups.prefetch import LARGE_BYTES, SMALL_BYTES, refill_below
from pp_offload._memory.buffers import HostBuffer, room_for
from pp_offload._transfer.outgoing import PACK_BYTES
from pp_offload.plan.bounds import Bounds, Watch
from pp_offload.plan.chunks import (
    Arrival,
    BackwardQueue,
    Block,
    ChunkState,
    GroupState,
    Held,
    Saved,
)
from pp_offload.plan.device import NumberDevice
from pp_offload.plan.host import HostPlaces
from pp_offload.simulate.clocks import VirtualEvent


@dataclass(slots=True)
class Pending:
    """A batch on its way to the host."""

    saved: list[Saved]
    nbytes: int
    offloaded: VirtualEvent


@dataclass
class Moved:
    """Totals of a rank, as those of the engine's statistics."""

    bytes_offloaded: int = 0
    bytes_reloaded: int = 0
    prefetched_reloads: int = 0
    on_demand_reloads: int = 0
    taken_back: int = 0


class Rules:
    """One rank's engine.

    Args:
        device: Where it works.
        host: Where payloads go.
        bounds: On what is on its way.
        order: Chunks in backward order.
        moved: Counts what is moved.
    """

    def __init__(
        self,
        device: NumberDevice,
        host: HostPlaces,
        bounds: Bounds,
        order: Sequence[ChunkKey],
        moved: Moved,
    ) -> None:
        self.queue = BackwardQueue(order)
        self.moved = moved
        self.watch = Watch(device)
        self._device = device
        self._host = host
        self._bounds = bounds
        self._pending: deque[Pending] = deque()
        self._unwanted: deque[Saved] = deque()
        self._reload_bytes = 0
        self._current: GroupState | None = None
        self._is_done = False

    # Forward

    def open(self, chunk: ChunkState) -> None:
        """A group starts; with the first one, the chunk is queued."""
        self.queue.queued[chunk.key] = chunk

    def is_next(self, chunk: ChunkState) -> bool:
        """As ``StepRecord.is_next``."""
        return next(self.queue.certain(), None) is chunk

    def close(self, chunk: ChunkState, position: int, *, keeps: bool) -> None:
        """A group is committed: it leaves, or stays."""
        saved = [chunk.saved[index] for index in chunk.tape.groups[position].payloads]
        if keeps:
            for one in saved:
                one.source.num_holders += 1
            return
        chunk.groups[position].sent = saved
        self._is_done = False
        self._bounds.window.expect(sum(one.nbytes for one in saved))
        if saved:
            self.watch.left(GroupKey(chunk.key, position), self._offload(saved))

    def _offload(self, saved: list[Saved]) -> int:
        """As ``TransferEngine.offload``."""
        device, nbytes = self._device, sum(one.nbytes for one in saved)
        blocks = [self._place(batch, room) for batch, room in packs(saved)]
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
            for one in saved:
                one.source.num_holders += 1
                one.is_in_flight = True
            self._pending.append(Pending(saved, nbytes, offloaded))
        self._bounds.cap.expect(nbytes)
        self._keep_bounded(nbytes)
        return nbytes

    def _place(self, batch: list[Saved], room: int) -> Block:
        self.poll()
        block = Block(self._host.allocate(room))
        begin = 0
        for one in batch:
            one.block, one.begin, one.has_left = block, begin, True
            begin += room_for(one.nbytes)
        return block

    def _d2h_waits_for_last_users(self, buffers: Sequence[HostBuffer]) -> None:
        """As the method of ``Copies`` of this name."""
        d2h = self._device.d2h
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
            if sum(one.nbytes for one in self._pending) <= most:
                return
            self.watch.wait(self._pending[0].offloaded)
            self._finish()

    def poll(self) -> None:
        """As ``Copies.poll``."""
        now_s = self._device.host.now_s
        while self._pending and self._pending[0].offloaded.time_s <= now_s:
            self._finish()
        while self._unwanted:
            self._give_up(self._unwanted.popleft())

    def _finish(self) -> None:
        for one in self._pending.popleft().saved:
            one.is_in_flight = False
            self.drop(one.source)

    # Backward

    def begin_backward(self, key: ChunkKey) -> None:
        """As ``StepRecord.begin_backward``."""
        self.queue.begin(key)

    def use(self, chunk: ChunkState, index: int) -> None:
        """As ``SavedActivation.unpack``."""
        one, group = chunk.saved[index], chunk.group_of[index]
        if not group.is_used or (one.has_left and one.arrival is None):
            self._on_use(group)
        if one.has_left:
            self._deliver(one)

    def release(self, one: Saved) -> None:
        """Backward has let go of what it was given."""
        for held in one.given:
            self.drop(held)
        one.given.clear()

    def gone(self, one: Saved) -> None:
        """Autograd holds it no more."""
        one.is_gone = True
        if not one.has_left:
            self.drop(one.source)
            return
        if one.arrival is not None:
            self._unwanted.append(one)
        one.block = None

    def drop(self, held: Held) -> None:
        """One holder less of device memory."""
        held.num_holders -= 1
        if not held.num_holders:
            self._device.memory.add(-held.nbytes)

    def _deliver(self, one: Saved) -> None:
        """As ``TransferEngine.deliver``."""
        if one.arrival is None:
            if one.is_in_flight:
                self._take_back(one)
                return
            self.poll()
            self.moved.on_demand_reloads += self._reload([one])
        assert one.arrival is not None and one.memory is not None
        if not one.arrival.is_there:
            assert one.arrival.reloaded is not None
            self.watch.wait(one.arrival.reloaded)
            one.arrival.is_there = True
        if one.memory not in one.given:
            one.memory.num_holders += 1
            one.given.append(one.memory)
        if self._used(one) <= 0:
            self._give_up(one)
        self.watch.used(one.nbytes, one.num_waiting, one.spec.num_uses)
        self._refill()

    def _take_back(self, one: Saved) -> None:
        self.moved.taken_back += 1
        self._used(one)
        one.source.num_holders += 1
        one.given.append(one.source)
        self._refill()

    def _used(self, one: Saved) -> int:
        left = one.num_waiting
        one.num_waiting = (left if left > 0 else one.spec.num_uses) - 1
        return one.num_waiting

    def _give_up(self, one: Saved) -> None:
        """As ``PendingReloads.give_up``."""
        if one.memory is not None:
            self._reload_bytes -= one.nbytes
            memory, one.memory, one.arrival = one.memory, None, None
            self.drop(memory)

    # Reloads ahead

    def _on_use(self, group: GroupState) -> None:
        """As ``Prefetcher.on_use``."""
        if group is not self._current or not group.is_used:
            self._current = group
            if not group.is_used:
                group.is_used = True
                self.watch.reached = GroupKey(group.chunk.key, group.position)
            if not group.is_brought:
                batch = self._missing(group, self._bounds.window.nbytes - self._reload_bytes, set())
                if batch:
                    self._load([batch], is_ahead=False)
        self._fill()

    def _refill(self) -> None:
        if self._reload_bytes < refill_below(self._bounds.window.nbytes):
            self._fill()

    def _fill(self) -> None:
        """As ``Prefetcher.fill``."""
        group, window_bytes = self._current, self._bounds.window.nbytes
        if group is None or self._is_done or self._reload_bytes > refill_below(window_bytes):
            return
        room = window_bytes - self._reload_bytes
        batches: list[list[Saved]] = []
        chosen: set[Saved] = set()
        following = group
        for following in chain((group,), self._after(group)):
            if following.is_brought:
                continue
            batch = self._missing(following, room, chosen)
            batches.append(batch)
            chosen.update(batch)
            room -= sum(one.nbytes for one in batch)
            if not following.is_brought:
                break
        self._load(batches, is_ahead=True)
        self._is_done = following.is_brought

    def _after(self, group: GroupState) -> Iterator[GroupState]:
        """As ``StepRecord.after``."""
        yield from reversed(group.chunk.groups[: group.position])
        for chunk in self.queue.certain():
            yield from reversed(chunk.groups)

    def _missing(self, group: GroupState, room: int, chosen: set[Saved]) -> list[Saved]:
        """As ``Prefetcher._missing``."""
        batch: list[Saved] = []
        may_exceed = not chosen and self._reload_bytes == 0
        is_current = group is self._current
        for one in group.waiting():
            is_here = one.arrival is not None or (is_current and one.is_in_flight)
            if not is_here and one not in chosen:
                if one.nbytes > room and not (may_exceed and not batch):
                    return batch
                batch.append(one)
                room -= one.nbytes
        group.is_brought = True
        return batch

    def _load(self, batches: list[list[Saved]], *, is_ahead: bool) -> None:
        """As ``Prefetcher._load``."""
        for together in batched(batches):
            self.poll()
            num = self._reload(together)
            if is_ahead:
                self.moved.prefetched_reloads += num
            else:
                self.moved.on_demand_reloads += num

    def _reload(self, saved: list[Saved]) -> int:
        """As ``Copies.copy_to_device``."""
        device, arrival = self._device, Arrival()
        for one in saved:
            one.arrival, one.memory = arrival, Held(one.spec.reload_bytes)
            device.memory.add(one.spec.reload_bytes)
            self._reload_bytes += one.nbytes
            self.moved.bytes_reloaded += one.nbytes
        device.h2d.wait_stream(device.compute)
        blocks = {one.block: None for one in saved if one.block is not None}
        for block in blocks:
            device.h2d.wait_until(block.offloaded_s)
        sizes = [size for one in saved for size in one.sizes()]
        arrival.reloaded = self.watch.copy(sizes, to_host=False)
        for block in blocks:
            block.loan.buffer.last_use = arrival.reloaded
        return len(saved)


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


def batched(batches: Sequence[Sequence[Saved]]) -> Iterator[list[Saved]]:
    """Small payloads of several groups together, large ones of a group apart."""
    together: list[Saved] = []
    nbytes = 0
    for batch in batches:
        for one in batch:
            together.append(one)
            nbytes += one.nbytes
            if nbytes >= LARGE_BYTES:
                yield together
                together, nbytes = [], 0
        if nbytes >= SMALL_BYTES:
            yield together
            together, nbytes = [], 0
    if together:
        yield together
