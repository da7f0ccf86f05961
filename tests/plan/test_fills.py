"""What stays fits, in a few tries, whichever order groups stay in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pp_offload.plan.fills import Candidate, Fill

Peak = Callable[[Sequence[Candidate]], int]


def groups(*sizes: int) -> list[Candidate]:
    return [Candidate(nbytes, 0, "mlp", position) for position, nbytes in enumerate(sizes)]


def filled(candidates: list[Candidate], limit: int, peak: Peak) -> tuple[list[int], int]:
    """Positions of what stays, and how many peaks were needed."""
    at = {group.place: group for group in candidates}
    fill, num = Fill(candidates, limit), 0
    while fill.is_trying:
        fill.learn(peak([at[place] for place in fill.stay]))
        num += 1
    return [position for _, position in fill.stay], num


def summed(stay: Sequence[Candidate]) -> int:
    """In flight twice, beside what is there."""
    return 100 + 2 * sum(group.nbytes for group in stay)


def test_as_many_stay_as_fit() -> None:
    for limit in range(100, 261, 7):
        positions, num = filled(groups(*[10] * 8), limit, summed)
        assert positions == [*range(min(8, (limit - 100) // 20))]
        assert num <= 5


def test_a_smaller_group_takes_the_room_that_a_larger_one_leaves() -> None:
    assert filled(groups(50, 50, 8, 8, 8), 100 + 2 * 70, summed)[0] == [0, 2, 3]


def test_all_may_be_lower_than_some() -> None:
    """With nothing to come back there is no room to be left for it."""

    def peak(stay: Sequence[Candidate]) -> int:
        others = [group for group in stay if group.nbytes == 10]
        return 100 + 1000 * (len(others) < len(stay)) + 50 * (0 < len(others) < 4)

    assert filled(groups(90, 10, 10, 10, 10), 110, peak)[0] == [1, 2, 3, 4]
