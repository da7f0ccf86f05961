"""Backward in two parts: the gradients of a chunk's inputs first, those of its weights later.

Both read the same payloads, the second part only some of them. The weight pass is one more visit of
the chunk's groups. Which payloads a part uses is learnt from the last chunk of the same stage, so
that nothing else comes back for it; a part of which nothing is known gets all.

    split.begin(key, BackwardPass.INPUT)   # backward_one_chunk(full_backward=False)
    split.end()
    split.begin(key, BackwardPass.WEIGHT)  # backward_weight_one_chunk, maybe much later
    split.end()
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from pp_offload._core.batch import Batch
from pp_offload._core.group import Group
from pp_offload._policy.plan import ChunkKey, GroupKey, WeightPassKey


class BackwardPass(enum.Enum):
    """Which part of a backward."""

    INPUT = "input"
    WEIGHT = "weight"


class Visited(NamedTuple):
    """A group's place in a part, the same for all chunks of a stage."""

    vp_stage: int
    position: int
    part: BackwardPass


class Running(NamedTuple):
    """The part that runs."""

    key: ChunkKey
    part: BackwardPass
    batches: Sequence[tuple[int, Batch]]
    """By position; held, so that what they used is known when the graph is gone."""


class SplitBackward:
    """Follows the parts of such chunks.

    Args:
        step: Has the chunks.
        chunks: Those whose backward comes in two parts.
        is_keeping: Whether what both parts use stays on the device in between.

    Attributes:
        used: Which payloads a part used of a group's when it last ran.
    """

    def __init__(self, step: Any, chunks: frozenset[ChunkKey], *, is_keeping: bool) -> None:
        self.chunks = chunks
        self._step = step
        self._is_keeping = is_keeping
        self.used: dict[Visited, frozenset[int]] = {}
        self._running: Running | None = None

    def follow(self, group: Group) -> None:
        """A group left: know what the first part of its backward will use."""
        if group.key is not None and group.key.chunk in self.chunks:
            self._expect([group], BackwardPass.INPUT)

    def begin(self, key: ChunkKey, part: BackwardPass) -> None:
        """A part of a chunk's backward begins."""
        groups = self._groups(key)
        batches = [(i, batch) for i, group in enumerate(groups) if (batch := _batch(group))]
        self._running = Running(key, part, batches)

    def stop(self) -> None:
        """The part that runs ended by an exception, and teaches nothing."""
        self._running = None

    def end(self) -> None:
        """The part that runs ended well: know what it used, and what the second part will use."""
        running, self._running = self._running, None
        if running is None:
            return
        key, part, batches = running
        for position, batch in batches:
            left = batch.back.left
            used = [i for i, uses in enumerate(batch.uses) if left[i] < uses]
            self.used[Visited(key.vp_stage, position, part)] = frozenset(used)
        if part is BackwardPass.INPUT:
            self._expect(self._groups(key), BackwardPass.WEIGHT)

    def clear(self) -> None:
        """The step is over: no part runs."""
        self._running = None

    def _expect(self, groups: Iterable[Group], part: BackwardPass) -> None:
        """What the part will use is to come, and nothing else."""
        for group in groups:
            batch = _batch(group)
            if batch is None or group.key is None:
                continue
            uses = self._uses(group.key, batch, part)
            batch.mover.expect_uses(batch, uses)

    def _uses(self, key: GroupKey, batch: Batch, part: BackwardPass) -> list[int]:
        """How often the part will use each payload; with those of both where it stays between."""
        stage, position = key.chunk.vp_stage, key.position
        used = self.used.get(Visited(stage, position, part))
        uses = [num if used is None or i in used else 0 for i, num in enumerate(batch.uses)]
        if self._is_keeping and part is BackwardPass.INPUT:
            later = self.used.get(Visited(stage, position, BackwardPass.WEIGHT), frozenset())
            uses = [num + batch.uses[i] * (i in later and num > 0) for i, num in enumerate(uses)]
        return uses

    def _groups(self, key: ChunkKey) -> Sequence[Group]:
        chunk = self._step.chunk(key)
        return () if chunk is None else chunk.groups


class WeightPass:
    """The second part of a chunk's backward, for the queue and the window: one more visit.

    Args:
        key: The chunk's.
        groups: The chunk's.
        split: Not needed: what is to come is noted with each batch.
    """

    def __init__(self, key: ChunkKey, groups: Sequence[Group], split: SplitBackward) -> None:
        self.key = WeightPassKey(key)
        self._groups = groups

    def is_empty_chunk(self, name: str | None = None) -> bool:
        """Whether it has nothing to visit. With a name always, for it has no groups of its own."""
        return name is not None or not self._groups

    def visits(self) -> Iterator[Group]:
        """The chunk's groups in the order in which backward visits them."""
        return reversed(self._groups)


def _batch(group: Group) -> Batch | None:
    return None if group.batch is None else group.batch()
