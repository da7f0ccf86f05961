"""Which chunk runs backward next, in numbers, where a schedule has told the order.

queue = BackwardQueue([ChunkKey(0, 0), ChunkKey(0, 1)])
queue.push(chunk)
queue.begin(chunk.key)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pp_offload._policy.plan import ChunkKey, WeightPassKey
from pp_offload._steps.chunk_queue import Key
from pp_offload.plan.chunks import ChunkState, GroupState
from pp_offload.plan.parts import WeightState

Visit = GroupState | WeightState
"""What backward visits."""


@dataclass
class BackwardQueue:
    """Chunks, and second parts of their backwards, in the order in which backward runs them."""

    order: Sequence[Key]
    queued: dict[Key, ChunkState | WeightState] = field(default_factory=dict)
    begun: set[Key] = field(default_factory=set)
    num_done: int = 0

    def push(self, one: ChunkState | WeightState) -> None:
        """As ``ChunkQueue.push``."""
        self.queued[one.key] = one

    def certain(self) -> Iterator[ChunkState | WeightState]:
        """As ``ChunkQueue.certain``."""
        for number in range(self.num_done, len(self.order)):
            one = self.queued.get(self.order[number])
            if one is not None:
                yield one
            elif self.order[number] not in self.begun:
                return

    def skip(self, key: ChunkKey) -> None:
        """As ``ChunkQueue.skip``: its forward had no groups."""
        self.begun.update((key, WeightPassKey(key)))

    def begin(self, key: Key) -> None:
        """Its backward begins, or the second part of it."""
        self.queued.pop(key, None)
        self.begun.add(key)
        while self.num_done < len(self.order) and self.order[self.num_done] in self.begun:
            self.num_done += 1
