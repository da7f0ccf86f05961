"""Backwards in two parts, in numbers: what each part uses, and what comes back for the second one.

As :mod:`pp_offload._groups.split_backward` does it, with payloads of a tape for tickets.

    uses = PartUses(frozenset(keys), is_keeping=False)   # of a rank, over all its steps
    uses.learn(key, BackwardPass.INPUT, Counter({3: 1}))
    uses.foreseen(key, BackwardPass.INPUT)
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pp_offload._groups.split_backward import BackwardPass
from pp_offload._policy.plan import ChunkKey, WeightPassKey
from pp_offload.plan.chunks import ChunkState, Held, Saved

Uses = Mapping[int, int]
"""How often a part used each payload, in the order of first use."""


class PartUses:
    """What parts used when they last ran, as ``SplitBackward`` foresees it.

    Args:
        chunks: Those whose backward comes in two parts.
        is_keeping: Whether what both parts use stays on the device in between.
    """

    def __init__(self, chunks: frozenset[ChunkKey], *, is_keeping: bool) -> None:
        self.chunks = chunks
        self.is_keeping = is_keeping
        self._seen: dict[tuple[ChunkKey | int, BackwardPass], Uses] = {}

    def copied(self) -> PartUses:
        """Another one that knows the same so far."""
        other = copy.copy(self)
        other._seen = dict(self._seen)
        return other

    def learn(self, key: ChunkKey, part: BackwardPass, used: Uses) -> None:
        """As ``SplitBackward.end``."""
        self._seen[key, part] = self._seen[key.vp_stage, part] = used

    def foreseen(self, key: ChunkKey, part: BackwardPass) -> Uses:
        """As the method of ``SplitBackward`` of this name."""
        seen = self._seen.get((key, part))
        return self._seen.get((key.vp_stage, part), {}) if seen is None else seen

    def follow(self, key: ChunkKey, saved: Sequence[Saved]) -> None:
        """As the method of ``SplitBackward`` of this name."""
        uses = self.foreseen(key, BackwardPass.INPUT) if key in self.chunks else {}
        if uses:
            for one in saved:
                one.num_waiting = uses.get(one.index, 0)


class WeightState:
    """As ``WeightPass``.

    Args:
        chunk: Whose second part it is.
        uses: Foresees what is used.
    """

    def __init__(self, chunk: ChunkState, uses: PartUses) -> None:
        self.key = WeightPassKey(chunk.key)
        self.is_brought = False
        self._chunk = chunk
        self._uses = uses
        self._unclaimed: dict[int, int] | None = None

    def visits(self) -> Iterator[WeightState]:
        """Itself, if it is known to use something."""
        if self._foreseen():
            yield self

    def waiting(self) -> list[Saved]:
        """Payloads it is known to use."""
        return self._living(self._foreseen())

    def wanted(self) -> list[Saved]:
        """Those that must be on the device, but for what the first part leaves there."""
        if self._unclaimed is None:
            self._unclaimed = dict(self._foreseen())
        return self._living(index for index in self._unclaimed if not self._stays(index))

    def claim(self, saved: Sequence[Saved]) -> None:
        """Keep their memory until this part has used them."""
        for one in saved:
            if self._unclaimed is not None:
                num_uses = self._unclaimed.pop(one.index, 0)
                one.num_waiting = max(one.num_waiting, 0) + num_uses

    def _stays(self, index: int) -> bool:
        first = self._uses.foreseen(self.key.chunk, BackwardPass.INPUT)
        return self._uses.is_keeping and index in first

    def _living(self, indices: Iterable[int]) -> list[Saved]:
        saved = (self._chunk.saved[index] for index in indices)
        return [one for one in saved if one.has_left and not one.is_gone]

    def _foreseen(self) -> Uses:
        return self._uses.foreseen(self.key.chunk, BackwardPass.WEIGHT)


class RunningPart:
    """The part of a backward that runs.

    Args:
        chunk: Whose it is.
        part: Which.
        uses: Foresees what the other one uses, and learns when this one ends.
        kept: What the first part left on the device, by payload.
    """

    def __init__(
        self, chunk: ChunkState, part: BackwardPass, uses: PartUses, kept: dict[int, Held]
    ) -> None:
        self.chunk = chunk
        self.is_second = part is BackwardPass.WEIGHT
        self._part = part
        self._uses = uses
        self._kept = kept
        self._used: Counter[int] = Counter()

    def note(self, index: int) -> list[Held]:
        """A payload is asked for; what was kept for others that are gone by now."""
        self._used[index] += 1
        saved = self.chunk.saved
        return [self._kept.pop(one) for one in list(self._kept) if saved[one].is_gone]

    def kept(self, index: int) -> Held | None:
        """What the first part left of a payload, for the second."""
        return self._kept.get(index) if self.is_second else None

    def keep(self, index: int, held: Held) -> list[Held]:
        """Leave memory to the second part, if it is known to use it; what that takes the place of.

        Whoever is kept has a holder more.
        """
        second = self._uses.foreseen(self.chunk.key, BackwardPass.WEIGHT)
        if self.is_second or not self._uses.is_keeping or index not in second:
            return []
        held.num_holders += 1
        before = self._kept.get(index)
        self._kept[index] = held
        return [] if before is None else [before]

    def end(self) -> list[Held]:
        """It is over; what nobody needs kept any more."""
        self._uses.learn(self.chunk.key, self._part, self._used)
        if not self.is_second:
            return []
        kept = list(self._kept.values())
        self._kept.clear()
        return kept
