"""Backward in two parts: the gradients of a chunk's inputs first, those of its weights later.

    split.begin(key, chunk.groups, BackwardPass.INPUT)   # backward_one_chunk(full_backward=False)
    split.begin(key, chunk.groups, BackwardPass.WEIGHT)  # backward_weight_one_chunk, later

The second part, the weight pass, visits the chunk's groups once more, and reads some payloads of
the first part. The payloads that a part uses are learned from the last chunk of the same stage, and
only these are reloaded for that part. Before that, all are.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from pp_offload._core.batch import Batch, Wanted
from pp_offload._core.group import ChunkKey, Group, Place, WeightPassKey
from pp_offload._core.observers import Observer
from pp_offload._core.saved import Saved


class BackwardPass(enum.Enum):
    """Part of a backward."""

    INPUT = "input"
    WEIGHT = "weight"


class Running(NamedTuple):
    """The running part of a backward."""

    key: ChunkKey
    groups: Sequence[Group]
    part: BackwardPass
    positions: dict[Batch, int]  # of the chunk's batches, held to read uses without the graph
    uses: defaultdict[int, Counter[int]]  # so far, by position, in order of first use, and index


class SplitBackward(Observer):
    """Learns which payloads each part uses, and reloads only those."""

    def __init__(self, chunks: frozenset[ChunkKey], *, is_keeping: bool) -> None:
        self.chunks = chunks
        self._is_keeping = is_keeping  # on the device in between, what both parts use
        # Uses of each payload by index, in the last run of each part, by place of the group.
        self.uses: dict[BackwardPass, dict[Place, dict[int, int]]] = {p: {} for p in BackwardPass}
        # Positions of a stage's groups in the order in which its second part reached them.
        self.order: dict[int, list[int]] = {}
        self._running: Running | None = None
        # Payloads of the first part, by position and index: while one lives, the mover gives it to
        # the second part as well.
        self._shared: dict[ChunkKey, dict[tuple[int, int], Tensor]] = {}

    def follow(self, group: Group) -> None:
        """Expect the uses of an offloaded group by each part of its backward, if learned."""
        batch, key = group.batch(), group.key
        if batch is None or key is None or key.chunk not in self.chunks:
            return
        first = self.uses[BackwardPass.INPUT].get(key.place)
        if first is None:
            return
        second = self.uses[BackwardPass.WEIGHT].get(key.place, {})
        later = {i: num for i, num in second.items() if not (self._is_keeping and i in first)}
        for index, num in later.items():
            batch.later.setdefault(index, {})[id(self)] = num
        indices = range(len(batch.sizes))
        uses = [first.get(index, 0) + later.get(index, 0) for index in indices]
        # A batch may be smaller than the last one, if another group has copied some of its bytes.
        part = frozenset(first).intersection(indices)
        group.engine.guarded(batch.mover.arrived.expect_uses, batch.back, uses, part)

    def begin(self, key: ChunkKey, groups: Sequence[Group], part: BackwardPass) -> None:
        batches = [group.batch() for group in groups]
        positions = {batch: position for position, batch in enumerate(batches) if batch is not None}
        self._running = Running(key, groups, part, positions, defaultdict(Counter))

    def used(self, saved: Saved, payload: Tensor) -> None:
        running = self._running
        position = None if running is None else running.positions.get(saved.batch)
        if running is None or position is None:
            return
        running.uses[position][saved.index] += 1
        if self._is_keeping and running.part is BackwardPass.INPUT:
            place = Place(running.key.vp_stage, position)
            if saved.index in self.uses[BackwardPass.WEIGHT].get(place, ()):
                self._shared.setdefault(running.key, {})[position, saved.index] = payload

    def stop(self) -> None:
        """End the running part after an exception, and learn nothing from it."""
        self._running = None

    def end(self) -> None:
        """End the running part: learn its uses, and expect the uses of the second part."""
        running, self._running = self._running, None
        if running is None:
            return
        key, groups, part, positions, uses = running
        order = list(uses)
        for position in positions.values():
            self.uses[part][Place(key.vp_stage, position)] = uses[position]
        if part is BackwardPass.INPUT:
            self._expect_second(key, groups)
        else:
            before = self.order.get(key.vp_stage, [])
            if not set(order) < set(before):  # groups may have stayed in this chunk
                self.order[key.vp_stage] = order
            self._shared.pop(key, None)

    def clear(self) -> None:
        """End the step: forget the running part and the payloads kept for it."""
        self._running = None
        self._shared.clear()

    def _expect_second(self, key: ChunkKey, groups: Sequence[Group]) -> None:
        """Expect the uses of the stage's last second part, or all uses, without kept payloads."""
        payloads = self._shared.get(key, {})
        for position, group in enumerate(groups):
            batch = group.batch()
            if batch is None or group.key is None:
                continue
            for later in batch.later.values():
                later.pop(id(self), None)
            second = self.uses[BackwardPass.WEIGHT].get(group.key.place)
            uses = list(batch.back.uses)
            if second is not None:
                uses = [second.get(index, 0) for index in range(len(uses))]
            uses = [0 if (position, index) in payloads else num for index, num in enumerate(uses)]
            group.engine.guarded(batch.mover.arrived.expect_uses, batch.back, uses)


class WeightPass:
    """The second part of a chunk's backward, as an entry of the queue."""

    def __init__(self, key: ChunkKey, groups: Sequence[Group], split: SplitBackward) -> None:
        self.key = WeightPassKey(key)
        self._groups, self._split = groups, split

    def is_empty_chunk(self, name: str | None = None) -> bool:
        """Whether the pass has no group; True for a name, for which the chunk itself is queued."""
        return name is not None or not self._groups

    def visits(self) -> Iterator[WeightVisit]:
        """Yield the chunk's groups in the order of the stage's last weight pass; none before it.
        The order differs from the first part's: PyTorch goes through the parameters.
        """
        stage, uses = self.key.chunk.vp_stage, self._split.uses[BackwardPass.WEIGHT]
        for position in self._split.order.get(stage, ()):
            if position < len(self._groups):
                yield WeightVisit(self._groups[position], uses[Place(stage, position)])


class WeightVisit:
    """Visit of a group in the second part, which used the payloads ``used`` the last time."""

    borrowed = ()

    def __init__(self, group: Group, used: Container[int]) -> None:
        self.batch = group.batch
        self._used = used

    def wanted(self) -> list[Wanted]:
        """Return the used payloads that are off the device and not reloaded for the first part."""
        wanted = []
        for batch, indices in self.uses():
            first, device = batch.back.part or (), batch.back.device
            away = [index for index in indices if device[index] is None and index not in first]
            if away:
                wanted.append((batch, away))
        return wanted

    def uses(self) -> list[Wanted]:
        """Return the payloads that the second part will use, by batch."""
        batch = self.batch()
        if batch is None:
            return []
        counts = enumerate(batch.back.uses_left)
        return [(batch, [index for index, num in counts if num > 0 and index in self._used])]
