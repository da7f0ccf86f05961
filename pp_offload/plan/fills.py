"""Fill one rank up to a limit with groups that stay.

    fill = Fill(as_saved(tapes), limit_bytes)
    while fill.is_trying:
        fill.learn(peak_of(fill.stay))
    fill.stay                            # places of the groups that stay

A fill predicts nothing: it proposes groups that stay, and is given the peak with them. So all ranks
are filled at the same time, each from the peaks of the same predicted steps.

NOTE [ Spread out ]
    The link is always busy if groups that leave are spread over a forward, between groups that
    stay. If groups that leave are saved one after the other, the link is first overloaded, and then
    idle. So groups stay in the order of the reversed bits of their positions, as with an engine's
    limit.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from typing import NamedTuple

from pp_offload._core.group import Place
from pp_offload._groups.which_stay import reversed_bits
from pp_offload.plan.tape import RankTapes

MOST_RUNS = 8
"""Runs of a fill: if no group of a kind fits, groups of another kind may."""


class Candidate(NamedTuple):
    """A group that may stay."""

    nbytes: int
    stage: int
    name: str
    position: int

    @property
    def place(self) -> Place:
        return Place(self.stage, self.position)

    @property
    def kind(self) -> tuple[int, int, str]:
        """Size, stage and name, which are equal for groups that take the same memory."""
        return self.nbytes, self.stage, self.name


def first_saved(tapes: RankTapes) -> list[Candidate]:
    """List groups with something to move, the first saved first."""
    return [
        Candidate(tape.nbytes(group), stage, group.name, position)
        for stage, tape in sorted(tapes.stages.items())
        for position, group in enumerate(tape.groups)
        if group.payloads
    ]


def as_saved(tapes: RankTapes) -> list[Candidate]:
    """Sort groups, the largest first. Of equal groups the last saved comes first, because backward
    needs it first.
    """
    return sorted(first_saved(tapes), reverse=True)


def largest_first(tapes: RankTapes) -> list[Candidate]:
    """Sort groups, the largest first; of equal groups, the first saved first."""
    return sorted(first_saved(tapes), key=lambda group: -group.nbytes)


def spread_out(tapes: RankTapes) -> list[Candidate]:
    """Sort groups in the order of NOTE [ Spread out ]."""
    last_first = first_saved(tapes)[::-1]
    order = partial(reversed_bits, num=len(last_first))
    return [last_first[index] for index in sorted(range(len(last_first)), key=order)]


class Fill:
    """Search of the groups that stay on one rank, in this order, a proposal after the other.

    Attributes:
        stay: Groups to try next; in the end the groups that stay. Empty if the peak is above the
            limit even if all groups leave.
        is_trying: Whether another peak is needed.
    """

    def __init__(self, groups: Sequence[Candidate], limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._proposals = self._search(groups)
        self.stay = _places(next(self._proposals))
        self.is_trying = True

    def learn(self, peak_bytes: int) -> None:
        """Note the peak of the proposal, and make the next proposal."""
        try:
            self.stay = _places(self._proposals.send(peak_bytes <= self._limit_bytes))
        except StopIteration as end:
            self.stay, self.is_trying = _places(end.value), False

    def _search(
        self, groups: Sequence[Candidate]
    ) -> Generator[Sequence[Candidate], bool, Sequence[Candidate]]:
        """Add as many groups as fit; then more groups, without the kinds that did not fit."""
        if (yield groups):
            return groups
        stay, more = list[Candidate](), list(groups)
        if not (yield stay):
            return stay
        for _ in range(MOST_RUNS):
            fits, too_many = 0, len(more)
            while too_many - fits > 1:
                middle = (fits + too_many) // 2
                if (yield [*stay, *more[:middle]]):
                    fits = middle
                else:
                    too_many = middle
            stay += more[:fits]
            more = [group for group in more[fits:] if group.kind != more[fits].kind]
            # All may have a lower peak than fewer: less is reloaded.
            if not more or (yield [*stay, *more]):
                return [*stay, *more]
        return stay


def _places(groups: Sequence[Candidate]) -> tuple[Place, ...]:
    return tuple(group.place for group in groups)
