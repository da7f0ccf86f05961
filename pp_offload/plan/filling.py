"""Fills one rank with what stays, from peaks that it is told: no step is predicted here.

filling = Filling(classes, limit_bytes, most_tries)
while filling.is_trying:
    filling.told(peak_of(filling.proposal))
filling.proposal  # what was found

NOTE [ Few and many classes ]
    Each adds about what its bytes say. So it is estimated how many fit, in their order, and what is
    found corrects that: as many tries as a search by halves takes, mostly less. A few classes are
    then looked at one by one, for a peak is somewhere in a step, and one of them may be gone there.
    With many classes that would be a try for each, and what each could still add is little: that is
    done where a step is longer than without offload, and there is time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator, Sequence
from itertools import accumulate, combinations

from pp_offload.plan.classes import Class, Kept, reversed_bits, with_more, with_num

FEW = 16
"""So many classes are looked at one by one. Stages of a rank have some kinds of groups each."""

PARTS = 8
"""With many classes, so much of them stays where all that comes back needs too much room."""

LEFT_EMPTY = 1 / 1024
"""With many classes such a part of the limit may stay empty."""


class Filling:
    """Fills one rank, a proposal after the other.

    Args:
        classes: Of its groups, in the order in which they are to stay.
        limit_bytes: Its peak may be so high.
        most_tries: So many proposals are made; at least 2, which are all and nothing.
        one_by_one: Classes are looked at one by one, however many they are.

    Attributes:
        proposal: What to try next; when nothing is left to try, what was found: of all that fit,
            that of most bytes. If none does, that with the lowest peak.
        is_trying: Whether something is left.
    """

    def __init__(
        self,
        classes: Sequence[Class],
        limit_bytes: int,
        most_tries: int,
        *,
        one_by_one: bool = False,
    ) -> None:
        self._classes = classes
        self._limit_bytes = limit_bytes
        self._num_left = most_tries
        self._in_runs = has_many(classes) and not one_by_one
        self._per_byte = 0.0
        """How much higher the peak is for each byte that stays; 0 where that is not known."""

        self._found: tuple[int, Kept] | None = None
        """What is best so far, and how good that is."""

        self._proposals = self._search()
        self.proposal: Kept = next(self._proposals)
        self.is_trying = True

    def told(self, peak_bytes: int) -> None:
        """The peak of the proposal."""
        if not self.is_trying:
            return
        self._note(peak_bytes)
        self._num_left -= 1
        try:
            self.proposal = self._proposals.send(peak_bytes)
            self.is_trying = self._num_left > 0
        except StopIteration:
            self.is_trying = False
        if not self.is_trying:
            assert self._found is not None, "it was noted"
            _, self.proposal = self._found

    def _note(self, peak_bytes: int) -> None:
        fits = peak_bytes <= self._limit_bytes
        nums = zip(self._classes, self.proposal, strict=True)
        good = sum(one.nbytes * num for one, num in nums) if fits else -peak_bytes
        if self._found is None or good > self._found[0]:
            self._found = good, self.proposal

    def _search(self) -> Generator[Kept, int, None]:
        everything = tuple(len(one.places) for one in self._classes)
        high = yield everything
        if high <= self._limit_bytes:
            return
        kept: Kept = (0,) * len(self._classes)
        peak = yield kept
        self._learn(high - peak, sum(one.nbytes * len(one.places) for one in self._classes))
        while peak > self._limit_bytes:
            lower = yield from self._parts() if self._in_runs else self._lower(kept, peak)
            if lower is None:
                return
            kept, peak = lower
        kept, peak = yield from self._filled(kept, peak)
        if not has_many(self._classes):  # of many there are too many pairs
            yield from self._swapped(kept)

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

    def _parts(self) -> Generator[Kept, int, tuple[Kept, int] | None]:
        """The same of many: a part of them that fits, the middle one first."""
        nothing = (0,) * len(self._classes)
        groups = self._others(nothing)
        for index in reversed_bits(range(PARTS))[1:]:
            kept = with_more(nothing, groups[: len(groups) * index // PARTS])
            found = yield kept
            if found <= self._limit_bytes:
                return kept, found
        return None

    def _filled(self, kept: Kept, peak: int) -> Generator[Kept, int, tuple[Kept, int]]:
        """With as many more as fit. Where one does not, nor does another one of its class."""
        more = self._others(kept)
        while more:
            num, peak = yield from self._most(kept, peak, more)
            kept = with_more(kept, more[:num])
            more = [number for number in more[num:] if number != more[num]]
            if self._in_runs:
                more = [number for number in more if self._seems_to_fit(number, peak)]
        return kept, peak

    def _most(
        self, kept: Kept, peak: int, more: Sequence[int]
    ) -> Generator[Kept, int, tuple[int, int]]:
        """As many as fit of groups of these classes, in their order, and the peak then.

        The next number to try is where the peak would be at the limit. As that may be wrong from
        one side again and again, it is in the middle where the last one has told little.
        """
        upto = list(accumulate((self._classes[number].nbytes for number in more), initial=0))
        fits, too_many = 0, len(more) + 1
        high, halves = 0, False
        while too_many - fits > 1 and not (fits and self._is_full(peak)):
            width = too_many - fits
            trial = (fits + too_many) // 2 if halves else self._estimate(upto, fits, peak)
            trial = min(max(trial, fits + 1), too_many - 1)
            found = yield with_more(kept, more[:trial])
            if found > self._limit_bytes:
                too_many, high = trial, found
            else:
                self._learn(found - peak, upto[trial] - upto[fits])
                fits, peak = trial, found
            if high:
                self._learn(high - peak, upto[too_many] - upto[fits])
            halves = not halves and too_many - fits > width // 2
        return fits, peak

    def _estimate(self, upto: Sequence[int], fits: int, peak: int) -> int:
        """How many seem to fit, if so many do with this peak."""
        if self._per_byte <= 0:
            return len(upto)
        room = (self._limit_bytes - peak) / self._per_byte
        return bisect_right(upto, upto[fits] + room) - 1

    def _seems_to_fit(self, number: int, peak: int) -> bool:
        return self._classes[number].nbytes * self._per_byte <= self._limit_bytes - peak

    def _is_full(self, peak: int) -> bool:
        return self._in_runs and peak >= self._limit_bytes * (1 - LEFT_EMPTY)

    def _learn(self, higher: int, nbytes: int) -> None:
        """So many bytes more, and the peak is so much higher."""
        if nbytes:
            self._per_byte = higher / nbytes

    def _others(self, kept: Kept) -> list[int]:
        """Classes of the groups that do not stay, in their order."""
        nums = enumerate(zip(self._classes, kept, strict=True))
        return [number for number, (one, num) in nums for _ in one.places[num:]]

    def _swapped(self, kept: Kept) -> Generator[Kept, int, None]:
        """A larger group in place of a smaller one, where that fits."""
        for large, small in combinations(range(len(self._classes)), 2):
            has_room = kept[large] < len(self._classes[large].places) and kept[small] > 0
            if has_room and self._classes[large].nbytes > self._classes[small].nbytes:
                other = with_num(with_num(kept, large, kept[large] + 1), small, kept[small] - 1)
                found = yield other
                if found <= self._limit_bytes:
                    more = [small] * (len(self._classes[small].places) - other[small])
                    num, _ = yield from self._most(other, found, more)
                    kept = with_more(other, more[:num])


def has_many(classes: Sequence[Class]) -> bool:
    """See NOTE [ Few and many classes ]."""
    return len(classes) > FEW
