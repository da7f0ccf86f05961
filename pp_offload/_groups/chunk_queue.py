"""Queue of chunks whose backward is next. The queue steers prefetch; no tensor depends on it.

The order is taken from the schedule's list of actions, or from an earlier step. Without either,
chunks of the last virtual stage come first, and within a stage chunks in forward order; then only
chunks of the last stage are certain.

    forward   s0 m0, s0 m1, s1 m0, s1 m1        queued   s1 m0, s1 m1, s0 m0, s0 m1
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
    """Chunks whose backward has not begun."""

    def __init__(self) -> None:
        self.is_scheduled = False
        self.vp_size = 1
        self._position: dict[Key, int] = {}
        self._order: list[Key] = []
        self._num_done = 0
        self._begun: set[Key] = set()
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
            self._begun.add(chunk.key)
            while self._num_done < len(self._order) and self._order[self._num_done] in self._begun:
                self._num_done += 1
        if chunk in self._queued:
            self._queued.remove(chunk)

    def has_begun(self, key: Key) -> bool:
        """Whether the backward of a chunk of this step, or a part of it, has begun."""
        return key in self._begun

    def forget(self, chunk: QueuedChunk) -> None:
        """Forget a chunk without living tensors, in a step that never ends."""
        self.remove(chunk)
        if chunk.key is not None and chunk.key not in self._position:
            self._begun.discard(chunk.key)

    def skip(self, key: ChunkKey) -> None:
        """Do not wait for the backward of this chunk, which has no groups."""
        self._begun.update((key, WeightPassKey(key)))

    def certain(self) -> Iterator[QueuedChunk]:
        """Yield the queued chunks, next first, up to a gap: a chunk whose forward is still to come.

        Prefetching chunks behind the gap would take the room that the missing chunk needs.
        """
        position = self._num_done
        for chunk in self._queued:
            if not self._order:
                if isinstance(chunk.key, ChunkKey) and chunk.key.vp_stage != self.vp_size - 1:
                    return
                yield chunk
                continue
            rank, _ = self._rank(chunk)
            while position < rank and self._order[position] in self._begun:
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
        self._begun.clear()
        self._num_done = 0

    def _rank(self, chunk: QueuedChunk) -> tuple[int, int]:
        """Sorting key: position in the order; unknown chunks by virtual stage, the last first."""
        key = chunk.key
        stage = key.vp_stage if isinstance(key, ChunkKey) else -1
        position = len(self._order) if key is None else self._position.get(key, len(self._order))
        return position, -stage if position == len(self._order) else 0
