"""Where all that leaves costs no time, ranks are filled but for those that would cost some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from pp_offload.plan.changes import Stay
from pp_offload.plan.classes import Class
from pp_offload.plan.search import Search
from pp_offload.plan.steps import Tried
from pp_offload.simulate.rank import PipelineStep, RankStep

MOST = 5

PLACES = tuple((0, position) for position in range(MOST))


class Known(Search):
    """A search whose steps are known.

    Args:
        slow: Ranks whose steps are longer where they keep more than so many groups.
        full: Ranks that are above the limit where they keep any.
    """

    def __init__(self, slow: Mapping[int, int], full: set[int]) -> None:
        self._steps: Any = SimpleNamespace(num=0)
        self._classes = [[Class(1, PLACES)]] * 6
        self.slow, self.full = slow, full

    def _try(self, kept: Sequence[Stay]) -> Tried:
        self._steps.num += 1
        ranks = [
            RankStep(
                seconds=1.0 + 0.01 * (num > self.slow.get(number, MOST)),
                busy_s=1.0,
                stalled_s=0.0,
                waited_s={},
                peak_bytes=2 if number in self.full and num else 1,
                host_peak_bytes=0,
                bytes_offloaded=MOST - num,
                on_demand_reloads=0,
                offload_s=0.0,
                num_in_flight=1,
                bounds=(0, 0),
            )
            for number, num in enumerate(map(len, kept))
        ]
        return Tried(tuple(kept), PipelineStep(ranks))


def filled_up(search: Known, most_steps: int = 100) -> list[int]:
    """How many stay on each rank."""
    nothing = search._try([frozenset()] * 6)
    found = search._filled_up(nothing, [frozenset(PLACES)] * 6, 1, most_steps)
    return [len(stay) for stay in found.kept]


def test_all_that_cost_nothing_are_filled() -> None:
    assert filled_up(Known({}, set())) == [5] * 6
    assert filled_up(Known({4: 0}, set())) == [5, 5, 5, 5, 0, 5]
    assert filled_up(Known({0: 0, 3: 0}, set())) == [0, 5, 5, 0, 5, 5]


def test_none_is_filled_beyond_the_limit() -> None:
    assert filled_up(Known({}, {1})) == [5, 0, 5, 5, 5, 5]
    assert filled_up(Known({2: 0}, {1})) == [5, 0, 0, 5, 5, 5]


def test_a_rank_that_would_cost_some_is_filled_in_part() -> None:
    for num in range(MOST):
        assert filled_up(Known({4: num}, set())) == [5, 5, 5, 5, num, 5]
    assert filled_up(Known({0: 3, 3: 2}, {1})) == [3, 0, 5, 2, 5, 5]


def test_it_ends_when_no_tries_are_left() -> None:
    search = Known({4: 0}, set())
    assert filled_up(search, most_steps=3) == [5, 5, 5, 0, 0, 0]
    assert search._steps.num == 3
