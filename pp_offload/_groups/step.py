"""Record of one step: its chunks in forward and in backward order.

When backward goes on to another chunk, only records are kept of chunks behind it, once no tensor of
theirs is alive. So the end of a step does not have to read and free all groups at once.

A queue has the chunks whose backward is next. It steers prefetch; no tensor depends on it. Its
order is that of the schedule's actions, or of an earlier step. Without either, chunks of the last
virtual stage come first, and within a stage in forward order; only chunks of the last stage are
certain::

    forward   s0 m0, s0 m1, s1 m0, s1 m1        queued   s1 m0, s1 m1, s0 m0, s0 m1
"""

from __future__ import annotations

import bisect
import threading
from collections import Counter
from collections.abc import Iterable, Iterator

from pp_offload._core.group import ChunkKey, Group, Place, WeightPassKey
from pp_offload._core.window import Visit
from pp_offload._groups.chunk import Chunk
from pp_offload._groups.plan import (
    ChunkRecord,
    ChunkShape,
    ChunksInFlight,
    GroupBytes,
    Plan,
    Stay,
    groups_sum,
    make_plan,
)
from pp_offload._groups.split_backward import BackwardPass, SplitBackward, WeightPass
from pp_offload.config import OffloadConfig


class StepRecord:
    """Follows a step, and gives the window the next groups."""

    def __init__(self) -> None:
        self.queue = ChunkQueue()
        self.pipeline_rank = 0
        self.options: OffloadConfig | None = None  # of the plan; None for the manager's
        self.is_warmup = True  # whether no step was complete so far
        # Least elements of a tensor that may leave; None before a forward with grad.
        self.smallest_numel: int | None = None
        self.in_backward: Chunk | None = None  # the chunk that backward reached last
        self.weight_pass: WeightPass | None = None  # second part of a backward, while it runs
        self.is_in_replay = False  # whether a CUDA graph is launched, as users of Megatron-LM's say
        # Saved bytes by group name, of the chunks live at the peak of the last complete step.
        self.summary: dict[str, GroupBytes] = {}
        self.unused: frozenset[Place] = frozenset()  # of groups that some step's loss did not need
        self._is_partly_forgotten = False
        self.chunks: dict[ChunkKey, Chunk] = {}  # each from its first group on, in forward order
        self._backward: dict[ChunkKey, Chunk | ChunkRecord] = {}
        self._live_at_peak: frozenset[ChunkKey] = frozenset()
        self._weight_passes: dict[ChunkKey, WeightPass] = {}
        self._numbers: Counter[int] = Counter()

    def add(self, chunk: Chunk, split: SplitBackward | None) -> None:
        """Number and queue a chunk whose first group starts; twice, if ``split`` lists it."""
        stage, number = chunk.vp_stage, chunk.microbatch
        number = self._numbers[stage] if number is None else number
        self._numbers[stage] = number + 1
        chunk.key = ChunkKey(stage, number)
        self.chunks[chunk.key] = chunk
        self.queue.push(chunk)
        if split is not None and chunk.key in split.chunks:
            second = self._weight_passes[chunk.key] = WeightPass(chunk.key, chunk.groups, split)
            self.queue.push(second)

    def begin(self, group: Group) -> None:
        self.begin_backward(self._chunk_of(group))

    def begin_backward(self, chunk: Chunk | None) -> None:
        """Note that backward reached ``chunk``, if any; those reached before may be over."""
        if chunk is None:
            return
        before, self.in_backward = self.in_backward, chunk
        if chunk.key is not None and self._backward.get(chunk.key) is not chunk:
            live = {k for k, c in self.chunks.items() if not c.is_finished()}
            live |= {k for k in self._weight_passes if WeightPassKey(k) not in self.queue.begun}
            if len(live) > len(self._live_at_peak):
                self._live_at_peak = frozenset(live)
            self._backward[chunk.key] = chunk
            self.queue.remove(chunk)
        if before is not chunk:
            begun = self._backward
            for earlier in [c for k, c in self.chunks.items() if k in begun and c is not chunk]:
                self._leave(earlier)

    def begin_part(self, chunk: Chunk, part: BackwardPass, split: SplitBackward) -> None:
        assert chunk.key is not None, "a step finds its chunks by key"
        split.begin(chunk.key, chunk.groups, part)
        if part is BackwardPass.INPUT:
            self.begin_backward(chunk)
        else:
            self.in_backward = chunk
            self.weight_pass = self._weight_passes[chunk.key]
            self.queue.remove(self.weight_pass)

    def _leave(self, chunk: Chunk) -> None:
        """Keep only the record of a chunk, if its backward is over."""
        key = chunk.key
        if key is None or key in self._weight_passes or chunk.uncommitted():
            return
        if chunk.is_over and chunk.is_finished():
            self._backward[key] = chunk.record(key)
            self.unused |= _unused([chunk])
            self._forget(key, chunk)

    def _forget(self, key: ChunkKey, chunk: Chunk) -> None:
        self.queue.forget(chunk)
        self.chunks.pop(key, None)
        self._weight_passes.pop(key, None)
        chunk.key = None  # a forward that goes on in it is added again

    def after(self, group: Group) -> Iterator[Visit]:
        """Yield the visits after ``group``: the rest of its chunk, last first; then the queue."""
        chunk = self._chunk_of(group)
        if self.weight_pass is not None:
            yield from self.weight_pass.visits()
        elif chunk is not None and group.key is not None:
            yield from reversed(chunk.groups[: group.key.position])
        for following in self.queue.certain():
            yield from following.visits()

    def forget_finished(self) -> None:
        """Forget chunks without living tensors, in a step that never ends."""
        num_chunks = self.num_chunks
        for key, chunk in list(self.chunks.items()):
            if chunk.is_over:
                self._forget(key, chunk)
        self._backward = {k: c for k, c in self._backward.items() if k in self.chunks}
        self._is_partly_forgotten |= self.num_chunks < num_chunks

    @property
    def num_chunks(self) -> int:
        """Number of chunks with groups that are not forgotten."""
        return len(self.chunks.keys() | self._backward.keys())

    def awaited_elsewhere(self) -> Chunk | None:
        """Return a chunk of another living thread whose backward is still to come, or None."""
        here = threading.current_thread()
        others = (c for c in self.chunks.values() if c.thread is not here and c.thread.is_alive())
        return next((chunk for chunk in others if chunk.is_awaited), None)

    def is_complete(self, *, is_ended: bool) -> bool:
        """Whether groups saved tensors, and backward is over in each chunk. If the user says that
        the step ``is_ended``, groups that no loss needed may be alive, in outputs.
        """
        if self._is_partly_forgotten or not self._backward:
            return False
        return all(chunk.is_finished(is_ended=is_ended) for chunk in self.chunks.values())

    def has_dropped(self) -> bool:
        """Whether the graph of a chunk was freed without its backward."""
        return any(c.is_over and not c.is_finished() for c in self.chunks.values())

    def has_saved_nothing(self) -> bool:
        """Whether the step had groups, all committed, and none saved a tensor that may leave."""
        groups = [group for chunk in self.chunks.values() for group in chunk.groups]
        is_over = not any(chunk.uncommitted() for chunk in self.chunks.values())
        return bool(groups) and is_over and not any(g.counts.num_tensors for g in groups)

    def has_failed(self) -> bool:
        """Whether a forward raised in a group, as its context saw, or left a group open, unused."""
        groups = (group for chunk in self.chunks.values() for group in chunk.groups)
        return any(group.has_failed or group.is_left_behind for group in groups)

    def forgotten(self) -> list[str]:
        """Return names of groups that were started, used by backward, and never committed."""
        groups = (group for chunk in self.chunks.values() for group in chunk.uncommitted())
        return [group.name for group in groups if group.is_forgotten]

    def in_flight(self) -> ChunksInFlight:
        """Return the number of chunks of each virtual stage whose backward is not over."""
        over = {k for k in self._backward.keys() & self.chunks if self.chunks[k].is_finished()}
        over -= {k for k in self._weight_passes if WeightPassKey(k) not in self.queue.begun}
        return tuple(sorted(Counter(key.vp_stage for key in self.chunks.keys() - over).items()))

    def shapes(self) -> tuple[ChunkShape, ...]:
        """Return the chunks as numbers, in backward order."""
        return tuple(
            [
                ChunkShape.of(key, each.groups) if isinstance(each, Chunk) else each.shape
                for key, each in self._backward.items()
            ]
        )

    def records(self) -> list[ChunkRecord]:
        """Return records of all chunks, also of chunks without backward."""
        return _records({**self.chunks, **self._backward})

    def make_plan(self, config: OffloadConfig, stay: Stay) -> Plan:
        """Learn from the step: the plan, the summary, and the backward order."""
        if not self.queue.is_scheduled:
            self.queue.set_order(self._backward)
        self.sum_up()
        self.unused |= _unused(self.chunks.values())
        options = self.options or config
        return make_plan(self.shapes(), options, self.pipeline_rank, stay, self.unused)

    def sum_up(self) -> None:
        """Make the summary of a complete step."""
        self.summary = {}
        for record in _records(self._backward):
            if record.shape.key in self._live_at_peak:
                for name, more in record.group_bytes.items():
                    self.summary[name] = groups_sum((self.summary.get(name, GroupBytes()), more))

    def clear(self) -> None:
        self._backward.clear()  # first: if an interrupt comes next, the step is not complete
        for chunk in self.chunks.values():
            chunk.reset()
        self.chunks.clear()
        self._weight_passes.clear()
        self._live_at_peak = frozenset()
        self._numbers.clear()
        self.queue.clear()
        self.smallest_numel = self.in_backward = self.weight_pass = None
        # A replay that failed may never say that it is over.
        self._is_partly_forgotten = self.is_in_replay = False

    def _chunk_of(self, group: Group) -> Chunk | None:
        if group.key is None:
            return None
        chunk, position = self.chunks.get(group.key.chunk), group.key.position
        if chunk is None or position >= len(chunk.groups):
            return None
        return chunk if chunk.groups[position] is group else None


def _records(chunks: dict[ChunkKey, Chunk | ChunkRecord]) -> list[ChunkRecord]:
    return [
        chunk.record(key) if isinstance(chunk, Chunk) else chunk for key, chunk in chunks.items()
    ]


def _unused(chunks: Iterable[Chunk]) -> set[Place]:
    """Return the places of groups that saved something, and that backward has not reached."""
    groups = [g for c in chunks for g in c.groups if g.counts.num_tensors and not g.is_used]
    return {group.key.place for group in groups if group.key is not None}


Key = ChunkKey | WeightPassKey
QueuedChunk = Chunk | WeightPass  # a chunk, or the second part of its backward


class ChunkQueue:
    """Chunks whose backward has not begun."""

    def __init__(self) -> None:
        self.is_scheduled = False
        self.vp_size = 1
        self._position: dict[Key, int] = {}
        self._order: list[Key] = []
        self._num_done = 0
        self.begun: set[Key] = set()  # chunks of this step, and parts, whose backward has begun
        self._queued: list[QueuedChunk] = []

    def set_order(self, keys: Iterable[Key], *, is_scheduled: bool = False) -> None:
        """Sort chunks by this order of backward from now on; chunks without a key in it come last.
        An observed order does not replace a schedule's, which ``is_scheduled``.
        """
        self._order = list(keys)
        self._position = {key: position for position, key in enumerate(self._order)}
        self._num_done = 0
        self.is_scheduled = is_scheduled
        self._queued.sort(key=self._rank)

    def push(self, chunk: QueuedChunk) -> None:
        bisect.insort(self._queued, chunk, key=self._rank)

    def remove(self, chunk: QueuedChunk) -> None:
        """Take out a chunk whose backward begins."""
        if chunk.key is not None:
            self.begun.add(chunk.key)
            while self._num_done < len(self._order) and self._order[self._num_done] in self.begun:
                self._num_done += 1
        if chunk in self._queued:
            self._queued.remove(chunk)

    def forget(self, chunk: QueuedChunk) -> None:
        """Forget a chunk without living tensors, in a step that never ends."""
        self.remove(chunk)
        if chunk.key is not None and chunk.key not in self._position:
            self.begun.discard(chunk.key)

    def skip(self, key: ChunkKey) -> None:
        """Do not wait for the backward of this chunk, which has no groups."""
        self.begun.update((key, WeightPassKey(key)))

    def certain(self) -> Iterator[QueuedChunk]:
        """Yield the queued chunks, next first, up to a gap: a chunk whose forward is still to come.
        Prefetching chunks behind the gap would take the room that the missing chunk needs.
        """
        position = self._num_done
        for chunk in self._queued:
            if not self._order and isinstance(chunk.key, ChunkKey):
                if chunk.key.vp_stage != self.vp_size - 1:
                    return
            rank, _ = self._rank(chunk)
            while position < rank and self._order[position] in self.begun:
                position += 1
            if position < rank:
                return
            yield chunk
            position = min(rank + 1, len(self._order))

    def front(self, name: str | None = None) -> QueuedChunk | None:
        """Return the next chunk with a group (of that name); it stays queued."""
        return next((chunk for chunk in self._queued if not chunk.is_empty_chunk(name)), None)

    def pop(self, name: str | None = None) -> QueuedChunk | None:
        """Take out the next chunk with a group (of that name)."""
        chunk = self.front(name)
        if chunk is not None:
            self.remove(chunk)
        return chunk

    def clear(self) -> None:
        """Forget the chunks, but not the order."""
        self._queued.clear()
        self.begun.clear()
        self._num_done = 0

    def _rank(self, chunk: QueuedChunk) -> tuple[int, int]:
        """Sorting key: position in the order; unknown chunks by virtual stage, the last first."""
        key = chunk.key
        stage = key.vp_stage if isinstance(key, ChunkKey) else -1
        position = len(self._order) if key is None else self._position.get(key, len(self._order))
        return position, -stage if position == len(self._order) else 0
