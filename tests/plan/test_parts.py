"""What parts of a backward used says what the next ones will, by hand."""

from __future__ import annotations

from collections import Counter

from pp_offload._groups.split_backward import BackwardPass
from pp_offload._policy.plan import ChunkKey
from pp_offload.plan.chunks import Held, Saved
from pp_offload.plan.parts import PartUses
from pp_offload.plan.tape import Payload

FIRST, SECOND, OTHER = ChunkKey(0, 0), ChunkKey(0, 1), ChunkKey(1, 0)


def saved(num: int) -> list[Saved]:
    return [Saved(Payload(1024, 1024, 0, num_uses=3), index, Held(1024)) for index in range(num)]


def known() -> PartUses:
    uses = PartUses(frozenset({FIRST, SECOND, OTHER}), is_keeping=False)
    uses.learn(FIRST, BackwardPass.INPUT, Counter({0: 2}))
    return uses


def test_what_the_first_part_does_not_use_does_not_wait_for_it() -> None:
    for key in (FIRST, SECOND):  # of the same stage
        some = saved(2)
        known().follow(key, some)
        assert [one.num_waiting for one in some] == [2, 0]


def test_of_a_stage_that_nobody_has_seen_each_saved_tensor_counts() -> None:
    some = saved(2)
    known().follow(OTHER, some)
    assert [one.num_waiting for one in some] == [3, 3]


def test_what_a_copy_learns_the_other_does_not_know() -> None:
    """Or plans that follow the same first step would teach each other."""
    uses = known()
    uses.copied().learn(FIRST, BackwardPass.WEIGHT, Counter({1: 1}))
    assert not uses.foreseen(FIRST, BackwardPass.WEIGHT)
