"""Promise 1 on random programs: with offload, every result has the bits it has without."""

from __future__ import annotations

import random

import pytest
from helpers.fuzz.programs import drawn
from helpers.fuzz.run import check


@pytest.mark.parametrize("seed", range(30))
def test_a_random_program(seed: int) -> None:
    check(drawn(random.Random(seed)))
