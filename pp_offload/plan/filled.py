"""Fills all ranks up to a limit, each by itself, all at once.

    stays = fill(play, ranks, limit_bytes, most_tries)
    settle(play, stays, ranks, limit_bytes)

A prediction is of all ranks, so what each of them proposes is played together. What one keeps
changes when others wait, and with that what is on its way there: so in the end some may be above
the limit. Those keep less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pp_offload.plan.changes import Stay, fewer, stay_of
from pp_offload.plan.classes import Class, Kept
from pp_offload.plan.filling import Filling
from pp_offload.plan.steps import Tried

Play = Callable[[Sequence[Stay]], Tried]
"""Predicts the step in which these stay, rank by rank."""


def fill(
    play: Play,
    ranks: Sequence[Sequence[Class]],
    limit_bytes: int,
    most_tries: int,
    *,
    one_by_one: bool = False,
) -> list[Stay]:
    """What stays on each rank, as if the others were as they were when that was tried.

    Args:
        ranks: Classes of each, in the order in which they are to stay.
        limit_bytes: For each rank.
        most_tries, one_by_one: As for :class:`Filling`.
    """
    fillings = [
        Filling(classes, limit_bytes, most_tries, one_by_one=one_by_one) for classes in ranks
    ]
    while any(one.is_trying for one in fillings):
        found = play(_stays(ranks, [one.proposal for one in fillings]))
        for filling, rank in zip(fillings, found.step.ranks, strict=True):
            filling.told(rank.peak_bytes)
    return _stays(ranks, [one.proposal for one in fillings])


def settle(
    play: Play, stays: Sequence[Stay], ranks: Sequence[Sequence[Class]], limit_bytes: int
) -> Tried:
    """Try them together; who is above the limit keeps one group less, then two, four and so on.

    Returns:
        The last of these, in which none is above the limit that has a group to give up.
    """
    kept, num = list(stays), 1
    while not (found := play(kept)).fits(limit_bytes):
        less = [
            fewer(mine, classes, num) if one.peak_bytes > limit_bytes else mine
            for mine, classes, one in zip(kept, ranks, found.step.ranks, strict=True)
        ]
        if less == kept:
            break
        kept, num = less, 2 * num
    return found


def _stays(ranks: Sequence[Sequence[Class]], nums: Sequence[Kept]) -> list[Stay]:
    return [stay_of(*both) for both in zip(ranks, nums, strict=True)]
