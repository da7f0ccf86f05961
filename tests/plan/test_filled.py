"""Ranks are filled together, and settle with few tries where they are too full together."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from pp_offload.plan.changes import Stay
from pp_offload.plan.classes import Class
from pp_offload.plan.filled import fill, settle

NUM = 500

CLASSES = [Class(2 * NUM - place, ((0, place),)) for place in range(NUM)]


class Ranks:
    """Two ranks whose peaks are how many groups stay there; so many more of the first where the
    other one keeps any.
    """

    def __init__(self, more: int) -> None:
        self.more = more
        self.tried: list[tuple[int, ...]] = []

    def play(self, kept: Sequence[Stay]) -> Any:
        nums = tuple(map(len, kept))
        self.tried.append(nums)
        peaks = [nums[0] + self.more * (nums[1] > 0), nums[1]]
        return SimpleNamespace(
            step=SimpleNamespace(ranks=[SimpleNamespace(peak_bytes=peak) for peak in peaks]),
            fits=lambda limit_bytes: max(peaks) <= limit_bytes,
        )


def test_all_ranks_are_filled_with_the_tries_of_one() -> None:
    ranks = Ranks(more=0)
    found = fill(ranks.play, [CLASSES, CLASSES], 200, most_tries=100)
    assert [len(stay) for stay in found] == [200, 200]
    assert len(ranks.tried) < 12


@pytest.mark.parametrize("more", [1, 7, 150, 200])
def test_who_is_above_the_limit_keeps_less_in_larger_and_larger_parts(more: int) -> None:
    ranks = Ranks(more)
    full: list[Stay] = [frozenset(one.places[0] for one in CLASSES[:200])] * 2
    settle(ranks.play, full, [CLASSES, CLASSES], 200)
    last = ranks.tried[-1]
    assert last[0] + more <= 200 and last[1] == 200
    assert len(ranks.tried) < 10


def test_it_ends_where_nothing_more_can_leave() -> None:
    ranks = Ranks(more=201)
    full: list[Stay] = [frozenset(one.places[0] for one in CLASSES[:200])] * 2
    settle(ranks.play, full, [CLASSES, CLASSES], 200)
    assert ranks.tried[-1] == (0, 200)
