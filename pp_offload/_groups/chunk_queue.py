"""Which chunk runs backward next. It steers prefetch; no tensor depends on it.

The order is that of the schedule's own list of actions, or of an earlier step. Without either,
chunks are queued by Megatron's rule: those of the last virtual stage at once, the others when every
stage has as many, last stage first.

    forward   s0 m0, s0 m1, s1 m0, s1 m1      staged   s0: m0 m1     queued   s1 m0, s1 m1
    then      flush                                                  queued   ..., s0 m0, s0 m1
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator

from pp_offload._core.keys import ChunkKey, WeightPassKey
from pp_offload._groups.chunk import Chunk
from pp_offload._groups.split_backward import WeightPass

Key = ChunkKey | WeightPassKey
QueuedChunk = Chunk | WeightPass
"""A chunk, or the second part of its backward."""


class ChunkQueue:
    """Chunks whose backward has not begun.

    Attributes:
        is_told: Whether the order comes from a schedule.
    """

    def __init__(self) -> None:
        self.is_told = False
        self._position: dict[Key, int] = {}
        self._order: list[Key] = []
        self._num_done = 0
        self._num_of_last_stage = 0
        self._begun: set[Key] = set()
        self._queued: list[QueuedChunk] = []
        self._staged: dict[int, list[QueuedChunk]] = {}

    def know_order(self, keys: Iterable[Key], *, is_told: bool = False) -> None:
        """From now on chunks run backward in this order; unknown ones come last.

        Args:
            keys: First to run backward first.
            is_told: Whether it comes from a schedule; an order that was seen does not replace it.
        """
        self._order = list(keys)
        self._position = {key: position for position, key in enumerate(self._order)}
        self._num_done = 0
        self.is_told = is_told
        self._queued.sort(key=self._rank)

    def stage(self, chunk: QueuedChunk, vp_size: int, vp_stage: int) -> None:
        """Queue a chunk by Megatron's rule, or at once where the order is known."""
        if self._order or vp_size == 1:
            self.push(chunk)
            return
        if vp_stage == vp_size - 1:
            self.push(chunk)
            self._num_of_last_stage += 1
        else:
            self._staged.setdefault(vp_stage, []).append(chunk)
        counts = {len(self._staged.get(s, ())) for s in range(vp_size - 1)}
        if counts == {self._num_of_last_stage}:
            self.flush()

    def push(self, chunk: QueuedChunk) -> None:
        """Add a chunk where the order wants it; behind the others if it does not say."""
        bisect.insort(self._queued, chunk, key=self._rank)

    def flush(self) -> None:
        """Queue all staged chunks, the last stage first."""
        for vp_stage in sorted(self._staged, reverse=True):
            for chunk in self._staged[vp_stage]:
                self.push(chunk)
        self._staged.clear()
        self._num_of_last_stage = 0

    def remove(self, chunk: QueuedChunk) -> None:
        """Take a chunk out whose backward begins."""
        if chunk.key is not None:
            self._begun.add(chunk.key)
            while self._num_done < len(self._order) and self._order[self._num_done] in self._begun:
                self._num_done += 1
        for chunks in (self._queued, *self._staged.values()):
            if chunk in chunks:
                chunks.remove(chunk)

    def has_begun(self, key: Key) -> bool:
        """Whether the backward of a chunk of this step, or a part of it, has begun."""
        return key in self._begun

    def forget(self, chunk: QueuedChunk) -> None:
        """Forget a chunk of which nothing is left, in a step that never ends."""
        self.remove(chunk)
        if chunk.key is not None and chunk.key not in self._position:
            self._begun.discard(chunk.key)

    def skip(self, key: ChunkKey) -> None:
        """Do not wait for the backward of this chunk: it has no groups."""
        self._begun.update((key, WeightPassKey(key)))

    def certain(self) -> Iterator[QueuedChunk]:
        """The queued chunks, next one first, up to a chunk that is still to come.

        Prefetching chunks behind that gap would take the room that its groups need.
        """
        position = self._num_done
        for chunk in self._queued:
            rank = self._rank(chunk)
            while position < rank and self._order[position] in self._begun:
                position += 1
            if position < rank:
                return
            yield chunk
            position = min(rank + 1, len(self._order))

    def front(self, name: str | None = None) -> QueuedChunk | None:
        """The next chunk with a group (of that name); it stays queued."""
        return next((chunk for chunk in self._queued if not chunk.is_empty_chunk(name)), None)

    def pop(self, name: str | None = None) -> QueuedChunk | None:
        """Take out the next chunk with a group (of that name)."""
        chunk = self.front(name)
        if chunk is not None:
            self.remove(chunk)
        return chunk

    def clear(self) -> None:
        """Forget the chunks, not the order."""
        self._queued.clear()
        self._staged.clear()
        self._begun.clear()
        self._num_done = 0
        self._num_of_last_stage = 0

    def _rank(self, chunk: QueuedChunk) -> int:
        last = len(self._position)
        return last if chunk.key is None else self._position.get(chunk.key, last)
