"""Fills one rank with what stays, from peaks that it is told: no step is predicted here.

filling = Filling(classes, limit_bytes)
while filling.is_trying:
    filling.told(peak_of(filling.proposal))
filling.proposal  # what was found
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import combinations
from typing import NamedTuple

Kept = tuple[int, ...]
"""How many groups of each class stay on a rank: of equal ones those that are saved last."""


class Class(NamedTuple):
    """Groups of a rank that are equal."""

    nbytes: int
    places: tuple[tuple[int, int], ...]
    """By stage and position, last saved first."""


class Filling:
    """Fills one rank, a proposal after the other.

    Args:
        classes: Of its groups.
        limit_bytes: Its peak may be so high.

    Attributes:
        proposal: What to try next; when nothing is left to try, what was found.
        is_trying: Whether something is left.
    """

    def __init__(self, classes: Sequence[Class], limit_bytes: int) -> None:
        self._classes = classes
        self._limit_bytes = limit_bytes
        self._proposals = self._search()
        self.proposal: Kept = next(self._proposals)
        self.is_trying = True

    def told(self, peak_bytes: int) -> None:
        """The peak of the proposal."""
        if not self.is_trying:
            return
        try:
            self.proposal = self._proposals.send(peak_bytes)
        except StopIteration as end:
            self.proposal, self.is_trying = end.value, False

    def _search(self) -> Generator[Kept, int, Kept]:
        everything = tuple(len(one.places) for one in self._classes)
        if (yield everything) <= self._limit_bytes:
            return everything
        kept: Kept = (0,) * len(self._classes)
        peak = yield kept
        while peak > self._limit_bytes:
            lower = yield from self._lower(kept, peak)
            if lower is None:
                return kept
            kept, peak = lower
        for number in range(len(self._classes)):
            kept, peak = yield from self._most(kept, peak, number)
        return (yield from self._swapped(kept))

    def _lower(self, kept: Kept, peak: int) -> Generator[Kept, int, tuple[Kept, int] | None]:
        """A lower peak by keeping more: what comes back needs room, too, where little is kept."""
        best: tuple[Kept, int] | None = None
        for number, one in enumerate(self._classes):
            for num in {kept[number] + 1, len(one.places)} - {kept[number]}:
                if num <= len(one.places):
                    more = with_num(kept, number, num)
                    found = yield more
                    if found < (peak if best is None else best[1]):
                        best = more, found
        return best

    def _most(self, kept: Kept, peak: int, number: int) -> Generator[Kept, int, tuple[Kept, int]]:
        """As many of a class as fit, and the peak then.

        Each adds about as much, so the next one to try is where the peak would be at the limit. As
        that may be wrong from one side again and again, every other time it is in the middle.
        """
        limit_bytes, halves = self._limit_bytes, False
        fits, too_many = kept[number], len(self._classes[number].places) + 1
        trial = too_many - 1  # all, to begin with
        high = 0
        while trial > fits:
            found = yield with_num(kept, number, trial)
            if found <= limit_bytes:
                fits, peak = trial, found
            else:
                too_many, high = trial, found
            part = 0.5 if halves or not high else (limit_bytes - peak) / (high - peak)
            if too_many - fits == 1:
                break
            trial = min(max(fits + int(part * (too_many - fits)), fits + 1), too_many - 1)
            halves = not halves
        return with_num(kept, number, fits), peak

    def _swapped(self, kept: Kept) -> Generator[Kept, int, Kept]:
        """A larger group in place of a smaller one, where that fits."""
        for large, small in combinations(range(len(self._classes)), 2):
            has_room = kept[large] < len(self._classes[large].places) and kept[small] > 0
            if has_room and self._classes[large].nbytes > self._classes[small].nbytes:
                other = with_num(with_num(kept, large, kept[large] + 1), small, kept[small] - 1)
                found = yield other
                if found <= self._limit_bytes:
                    kept, _ = yield from self._most(other, found, small)
        return kept


def with_num(kept: Kept, number: int, num: int) -> Kept:
    """The same but for how many of one class stay."""
    return (*kept[:number], num, *kept[number + 1 :])
