"""Where all that leaves costs no time, ranks are filled but for those that would cost some."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from pp_offload.plan.changes import Stay
from pp_offload.plan.search import Search, Tried
from pp_offload.simulate.rank import PipelineStep, RankStep

MOST = 5


class Known(Search):
    """A search whose steps are known: those of some ranks are longer where they keep anything."""

    def __init__(self, slow: set[int], full: set[int]) -> None:
        self._steps: Any = SimpleNamespace(num=0)
        self.slow, self.full = slow, full

    def _try(self, kept: Sequence[Stay]) -> Tried:
        self._steps.num += 1
        ranks = [
            RankStep(
                seconds=1.0 + 0.01 * (number in self.slow and num > 0),
                busy_s=1.0,
                stalled_s=0.0,
                waited_s={},
                peak_bytes=2 if number in self.full and num else 1,
                host_peak_bytes=0,
                bytes_offloaded=MOST - num,
                offload_s=0.0,
                num_in_flight=1,
            )
            for number, num in enumerate(map(len, kept))
        ]
        return Tried(tuple(kept), PipelineStep(ranks))


def filled_up(search: Known, num_ranks: int = 6, most_steps: int = 100) -> list[int]:
    """How many stay on each rank."""
    nothing = search._try([frozenset()] * num_ranks)
    filled = [frozenset((0, position) for position in range(MOST))] * num_ranks
    found = search._filled_up(nothing, filled, list(range(num_ranks)), 1, most_steps)
    return [len(stay) for stay in found.kept]


def test_all_that_cost_nothing_are_filled() -> None:
    assert filled_up(Known(set(), set())) == [5] * 6
    assert filled_up(Known({4}, set())) == [5, 5, 5, 5, 0, 5]
    assert filled_up(Known({0, 3}, set())) == [0, 5, 5, 0, 5, 5]


def test_none_is_filled_beyond_the_limit() -> None:
    assert filled_up(Known(set(), {1})) == [5, 0, 5, 5, 5, 5]
    assert filled_up(Known({2}, {1})) == [5, 0, 0, 5, 5, 5]


def test_it_ends_when_no_tries_are_left() -> None:
    search = Known({4}, set())
    assert filled_up(search, most_steps=3) == [5, 5, 5, 0, 0, 0]
    assert search._steps.num == 3
