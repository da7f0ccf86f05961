"""The engine's rules on numbers: what leaves, what waits for what, and what comes back when.

Each method does what the one of the engine does that it names; only bytes and times are moved. A
run of both on the same tapes tells whether they still agree (tests/plan).

    rules = Rules(device, HostPlaces(), Bounds(config), keys, uses, Moved(), Unwatched(device))
    rules.close(chunk, position, keeps=False)
    rules.use(chunk, payload)
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from pp_offload._groups.chunk_queue import Key
from pp_offload._groups.plan import ChunkKey, WeightPassKey
from pp_offload._groups.prefetch import LARGE_BYTES, SMALL_BYTES, refill_below
from pp_offload._groups.split_backward import BackwardPass
from pp_offload._memory.buffers import HostBuffer, room_for
from pp_offload._transfer.outgoing import PACK_BYTES
from pp_offload._transfer.pending_reloads import MAX_ABANDONED
from pp_offload.plan.bounds import Bounds, Unwatched
from pp_offload.plan.chunks import (
    Arrival,
    Block,
    ChunkState,
    CopyIndex,
    GroupState,
    Held,
    Reload,
    Saved,
)
from pp_offload.plan.device import NumberDevice
from pp_offload.plan.host import HostPlaces
from pp_offload.plan.parts import PartUses, RunningPart, WeightState
from pp_offload.plan.queue import BackwardQueue, Visit
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


class Rules:
    """One rank's engine.

    Args:
        device: Where it works.
        host: Where payloads go.
        bounds: On what is on its way.
        order: Chunks in backward order, and second parts.
        uses: What parts of backwards use.
        moved: Counts what is moved.
        watch: Times the step.
    """

    def __init__(
        self,
        device: NumberDevice,
        host: HostPlaces,
        bounds: Bounds,
        order: Sequence[Key],
        uses: PartUses,
        moved: Moved,
        watch: Unwatched,
    ) -> None:
        self.queue = BackwardQueue(order)
        self.moved = moved
        self.watch = watch
        self._device = device
        self._host = host
        self._bounds = bounds
        self._copies = CopyIndex()
        self._pending: deque[Pending] = deque()
        self._unwanted: deque[Saved] = deque()
        self._abandoned: deque[Abandoned] = deque()
        self._uses = uses
        self._part: RunningPart | None = None
        self._weights: dict[ChunkKey, WeightState] = {}
        self._kept: defaultdict[ChunkKey, dict[int, Held]] = defaultdict(dict)
        self._in_flight_bytes = self._reload_bytes = 0
        self._chunk: ChunkState | None = None
        self._current: GroupState | None = None
        self._refill_below_bytes = refill_below(bounds.window.nbytes)
        self._is_done = False

    # Forward

    def open(self, chunk: ChunkState, position: int) -> None:
        """As ``StepRecord.add``: with its first group, a chunk is queued."""
        if position == 0:
            self.queue.push(chunk)
            if chunk.key in self._uses.chunks:
                self._weights[chunk.key] = WeightState(chunk, self._uses)
                self.queue.push(self._weights[chunk.key])

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
        self._bounds.window.expect(sum([one.nbytes for one in saved]))
        self._refill_below_bytes = refill_below(self._bounds.window.nbytes)
        new = self._copies.share(saved)
        if new:
            self.watch.left(chunk.key, position, self._offload(new))
        self._copies.add(new)
        self._uses.follow(chunk.key, saved)

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
            if self._in_flight_bytes <= most:
                return
            self.watch.wait(self._pending[0].offloaded)
            self._finish()

    def _keep_few_abandoned(self) -> None:
        """As ``PendingReloads.keep_few_abandoned``."""
        while len(self._abandoned) > MAX_ABANDONED:
            memory, reloaded = self._abandoned.popleft()
            self._device.compute.wait_event(reloaded)
            self._drop(memory)

    def poll(self) -> None:
        """As ``Copies.poll``."""
        now_s = self._device.host.now_s
        while self._pending and self._pending[0].offloaded.time_s <= now_s:
            self._finish()
        while self._unwanted:
            self._give_up(self._unwanted.popleft())
        while self._abandoned and self._abandoned[0].reloaded.time_s <= now_s:
            self._drop(self._abandoned.popleft().memory)

    def _finish(self) -> None:
        pending = self._pending.popleft()
        self._in_flight_bytes -= pending.nbytes
        for ref in pending.blocks:
            block = ref()
            if block is not None:
                block.in_flight.clear()
        for source in pending.sources:
            self._drop(source)

    # Backward

    def begin_backward(self, key: ChunkKey) -> None:
        """As ``StepRecord.begin_backward``."""
        self.queue.begin(key)

    def begin_part(self, chunk: ChunkState, part: BackwardPass) -> None:
        """As ``PipelineOffloadManager.backward_pass``, when it is entered."""
        self._part = RunningPart(chunk, part, self._uses, self._kept[chunk.key])
        if not self._part.is_second:
            self.begin_backward(chunk.key)
            return
        self.queue.begin(WeightPassKey(chunk.key))
        self._chunk, self._current = chunk, chunk.groups[-1]
        self._is_done = False
        self._refill_below_bytes = refill_below(self._bounds.window.nbytes)
        self._fill()

    def end_part(self) -> None:
        """As the same, when it is left."""
        assert self._part is not None, "begin_part() comes first"
        for held in self._part.end():
            self._drop(held)
        self._part = None
        self._is_done = False

    def use(self, chunk: ChunkState, index: int) -> None:
        """As ``SavedActivation.unpack``."""
        one, group = chunk.saved[index], chunk.group_of[index]
        if not group.is_used or (one.has_left and one.arrival is None):
            self._on_use(chunk, group)
        if not one.has_left:
            return
        if self._part is None:
            self._deliver(one)
        else:
            self._deliver_to(self._part, one)

    def release(self, chunk: ChunkState, index: int, use: int) -> None:
        """Backward has let go of what it was given for a use."""
        one = chunk.saved[index]
        if one.has_left:
            held, one.given[use] = one.given[use], None
            assert held is not None, "it is let go of once"
            self._drop(held)

    def gone(self, chunk: ChunkState, index: int) -> None:
        """Autograd holds it no more."""
        one = chunk.saved[index]
        one.is_gone = True
        if not one.has_left:
            self._drop(one.source)
            return
        if one.arrival is not None:
            self._unwanted.append(one)
        one.block = None

    def drop(self, chunk: ChunkState, source: int) -> None:
        """The program has let go of what was saved."""
        self._drop(chunk.sources[source])

    def _drop(self, held: Held) -> None:
        """One holder less of device memory."""
        held.num_holders -= 1
        if not held.num_holders:
            self._device.memory.add(-held.nbytes)

    def _deliver_to(self, part: RunningPart, one: Saved) -> None:
        """As ``SplitBackward.deliver``."""
        for held in part.note(one.index):
            self._drop(held)
        kept = part.kept(one.index)
        if kept is not None:
            self._give(one, kept)
            return
        self._deliver(one)
        given = one.given[-1]
        assert given is not None, "it was given just now"
        for before in part.keep(one.index, given):
            self._drop(before)

    def _give(self, one: Saved, held: Held) -> None:
        held.num_holders += 1
        one.given.append(held)

    def _deliver(self, one: Saved) -> None:
        """As ``TransferEngine.deliver``."""
        if one.arrival is None:
            source = one.source_in_flight
            if source is not None:
                self._take_back(one, source)
                return
            self.poll()
            self.moved.on_demand_reloads += self._bring([one])
        assert one.arrival is not None and one.memory is not None
        if not one.arrival.is_there:
            assert one.arrival.reloaded is not None
            self.watch.wait(one.arrival.reloaded)
            one.arrival.is_there = True
        self._give(one, one.memory)
        if self._used(one) <= 0:
            self._pass_on(one)
            self._give_up(one)
        self.watch.used(one.nbytes, one.num_waiting, one.spec.num_uses)
        self._refill()

    def _take_back(self, one: Saved, source: Held) -> None:
        self.moved.taken_back += 1
        self._used(one)
        self._give(one, source)
        self._refill()

    def _used(self, one: Saved) -> int:
        left = one.num_waiting
        one.num_waiting = (left if left > 0 else one.spec.num_uses) - 1
        return one.num_waiting

    def _give_up(self, one: Saved) -> None:
        """As ``PendingReloads.give_up``."""
        if one.memory is not None:
            memory, arrival, one.memory, one.arrival = one.memory, one.arrival, None, None
            memory.num_users -= 1
            if not memory.num_users:
                self._reload_bytes -= one.nbytes
                if arrival is not None and arrival.reloaded is not None and not arrival.is_there:
                    self._abandoned.append(Abandoned(memory, arrival.reloaded))
                    return
            self._drop(memory)

    # Several payloads of the same bytes

    def _share(self, one: Saved) -> bool:
        """As ``PendingReloads.share``."""
        for other in one.others():
            if other.arrival is not None and other.memory is not None:
                if other.arrival.reloaded is not None:
                    one.arrival, one.memory = other.arrival, other.memory
                    other.memory.num_users += 1
                    other.memory.num_holders += 1
                    return True
        return False

    def _pass_on(self, one: Saved) -> None:
        """As ``PendingReloads._pass_on``."""
        for other in one.others():
            if other.num_waiting > 0 and other.arrival is None and self._comes_soon(other):
                self._share(other)
                return

    def _comes_soon(self, one: Saved) -> bool:
        """As ``Prefetcher.comes_soon``."""
        room = self._bounds.window.nbytes
        for following in self._after():
            for other in following.waiting():
                if other is one:
                    return True
                room -= other.nbytes
            if room < 0:
                return False
        return False

    # Reloads ahead

    def _on_use(self, chunk: ChunkState, group: GroupState) -> None:
        """As ``Prefetcher.on_use``."""
        if group is not self._current or not group.is_used:
            self._chunk, self._current = chunk, group
            if not group.is_used:
                group.is_used = True
                self.watch.reached(chunk.key, group.position)
            if not group.is_brought:
                batch = self._missing(group, self._bounds.window.nbytes - self._reload_bytes, set())
                if batch:
                    self._load([batch], is_ahead=False)
        self._fill()

    def _refill(self) -> None:
        if self._reload_bytes < self._refill_below_bytes:
            self._fill()

    def _fill(self) -> None:
        """As ``Prefetcher.fill``."""
        group, window_bytes = self._current, self._bounds.window.nbytes
        if group is None or self._is_done or self._reload_bytes > refill_below(window_bytes):
            return
        room = window_bytes - self._reload_bytes
        batches: list[list[Saved]] = []
        chosen: set[Saved] = set()
        following: Visit = group
        for following in chain[Visit]((group,), self._after()):
            if following.is_brought:
                continue
            batch = self._missing(following, room, chosen)
            batches.append(batch)
            chosen.update(batch)
            room -= sum(one.nbytes for one in batch)
            if not following.is_brought:
                break
        self._load(batches, is_ahead=True)
        if following.is_brought:  # the last one, so that all are
            self._is_done = True
            self._refill_below_bytes = 0

    def _after(self) -> Iterator[Visit]:
        """As ``StepRecord.after``, from the group on that backward is at."""
        if self._part is not None and self._part.is_second:
            yield from self._weights[self._part.chunk.key].visits()
        elif self._chunk is not None and self._current is not None:
            yield from reversed(self._chunk.groups[: self._current.position])
        for one in self.queue.certain():
            yield from one.visits()

    def _missing(self, visit: Visit, room: int, chosen: set[Saved]) -> list[Saved]:
        """As ``Prefetcher._missing``."""
        batch: list[Saved] = []
        wanted = visit.wanted()
        may_exceed = not chosen and self._reload_bytes == 0
        is_current = visit is self._current
        for number, one in enumerate(wanted):
            is_here = one.arrival is not None or (is_current and one.source_in_flight is not None)
            if not is_here and one not in chosen:
                if one.nbytes > room and not (may_exceed and not batch):
                    visit.claim(wanted[:number])
                    return batch
                batch.append(one)
                room -= one.nbytes
        visit.claim(wanted)
        visit.is_brought = True
        return batch

    def _load(self, batches: list[list[Saved]], *, is_ahead: bool) -> None:
        """As ``Prefetcher._load``."""
        for together in batched(batches):
            self.poll()
            num = self._bring(together)
            if is_ahead:
                self.moved.prefetched_reloads += num
            else:
                self.moved.on_demand_reloads += num

    def _bring(self, saved: Sequence[Saved]) -> int:
        """As ``Copies.bring``."""
        batch, sharers = self._first_of_each(saved)
        if batch:
            self._reload(batch)
        left = [one for one in sharers if not self._share(one)]
        return len(batch) + (self._bring(left) if left else 0)

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
            elif not self._share(one):
                chosen.add((one.block, one.begin))
                batch.append(one)
        return batch, sharers

    def _reload(self, saved: Sequence[Saved]) -> None:
        """As ``Copies._queue_reload``."""
        device, arrival = self._device, Arrival()
        for one in saved:
            one.arrival, one.memory = arrival, Reload(one.spec.reload_bytes)
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
