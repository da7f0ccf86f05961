"""Promise 1 on random programs: with offload, every result has the bits it has without."""

from __future__ import annotations

import pytest
from helpers.programs import options_of, run
from helpers.sessions import assert_idle, assert_same, session

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface

BACKENDS = ["late", "random:{}", "late", "cpu", "threads"]


@pytest.mark.parametrize("seed", range(30))
def test_a_random_program(seed: int) -> None:
    expected = run(seed, False)
    assert sum(map(len, expected)) > 0
    with session(BACKENDS[seed % len(BACKENDS)].format(seed), **options_of(seed)) as manager:
        for step, (got, right) in enumerate(zip(run(seed, True), expected, strict=True)):
            assert_same(got, right, f"step {step}")
        off_interface.reset()
        del got
        assert_idle(manager)
