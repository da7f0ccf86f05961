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

from bisect import bisect_right
from collections.abc import Generator, Sequence
from functools import partial
from itertools import accumulate, count
from typing import NamedTuple

from pp_offload._groups.which_stay import reversed_bits
from pp_offload.plan.tape import RankTapes

Place = tuple[int, int]
"""Stage of a group, and position in the stage."""

MOST_RUNS = 8
"""Runs of a fill: if no group of a kind fits, groups of another kind may."""

NEARLY_FULL = 1 / 1024
"""Part of the limit. Less room ends a fill of more kinds than runs. Fewer kinds are all tried: a
peak is at one time of a step, at which a group may be freed.
"""


class Candidate(NamedTuple):
    """A group that may stay."""

    nbytes: int
    stage: int
    name: str
    position: int

    @property
    def place(self) -> Place:
        return self.stage, self.position

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
    """Search of the groups that stay on one rank, a proposal after the other.

    Args:
        groups: Groups of the rank, in the order in which they are to stay.
        limit_bytes: Highest peak of the rank.

    Attributes:
        stay: Groups to try next; in the end the groups that stay. Empty if the peak is above the
            limit even if all groups leave.
        is_trying: Whether another peak is needed.
    """

    def __init__(self, groups: Sequence[Candidate], limit_bytes: int) -> None:
        self._groups = groups
        self._limit_bytes = limit_bytes
        self._bytes_per_byte = 0.0  # of the peak, for each byte that stays
        self._proposals = self._search()
        self.stay = _places(next(self._proposals))
        self.is_trying = True

    def learn(self, peak_bytes: int) -> None:
        """Note the peak of the proposal, and make the next proposal."""
        try:
            self.stay = _places(self._proposals.send(peak_bytes))
        except StopIteration as end:
            self.stay, self.is_trying = _places(end.value), False

    def _search(self) -> Generator[Sequence[Candidate], int, Sequence[Candidate]]:
        """Add as many groups as fit; then more groups, without the kinds that did not fit."""
        stay, more = list[Candidate](), list(self._groups)
        high = yield more
        if high <= self._limit_bytes:
            return more
        peak = yield stay
        if peak > self._limit_bytes:
            return stay
        self._learn_rate(high - peak, sum(group.nbytes for group in more))
        has_many = len({group.kind for group in more}) > MOST_RUNS
        for _ in range(MOST_RUNS):
            num, peak = yield from self._most(stay, peak, more)
            stay += more[:num]
            more = [group for group in more[num:] if group.kind != more[num].kind]
            high = yield [*stay, *more]  # may be lower than with fewer: less is reloaded
            if high <= self._limit_bytes:
                return [*stay, *more]
            if has_many and self._limit_bytes - peak < self._limit_bytes * NEARLY_FULL:
                break
        return stay

    def _most(
        self, stay: Sequence[Candidate], peak: int, more: Sequence[Candidate]
    ) -> Generator[Sequence[Candidate], int, tuple[int, int]]:
        """Search the number of groups of ``more`` that fit in order, and the peak with them.

        The next number to try is the one whose expected peak is at the limit. Each third number is
        in the middle, because the expectation may err on the same side again and again.
        """
        upto = list(accumulate((group.nbytes for group in more), initial=0))
        fits, too_many = 0, len(more) + 1
        for number in count():
            if too_many - fits == 1:
                break
            is_third = number % 3 == 2
            trial = (fits + too_many) // 2 if is_third else self._expected(upto, fits, peak)
            trial = min(max(trial, fits + 1), too_many - 1)
            now = yield [*stay, *more[:trial]]
            self._learn_rate(now - peak, upto[trial] - upto[fits])
            if now > self._limit_bytes:
                too_many = trial
            else:
                fits, peak = trial, now
        return fits, peak

    def _expected(self, upto: Sequence[int], fits: int, peak: int) -> int:
        """Return the number of groups expected to fit, if ``fits`` of them have this peak."""
        if self._bytes_per_byte <= 0:
            return len(upto)
        room = (self._limit_bytes - peak) / self._bytes_per_byte
        return bisect_right(upto, upto[fits] + room) - 1

    def _learn_rate(self, higher_bytes: int, nbytes: int) -> None:
        if nbytes:
            self._bytes_per_byte = higher_bytes / nbytes


def _places(groups: Sequence[Candidate]) -> tuple[Place, ...]:
    return tuple(group.place for group in groups)
