"""A baseline is one that was seen to repeat."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from helpers.toy import repeated
from torch import Tensor


def runs(values: Iterable[float]) -> list[list[Tensor]]:
    return [[torch.tensor(1.0), torch.tensor(value)] for value in values]


def test_two_runs_are_enough() -> None:
    left = iter(runs([2.0, 2.0, 3.0]))
    assert repeated(lambda: next(left))[1] == 2
    assert next(left)[1] == 3, "no third run"


def test_a_first_run_that_differs_is_not_compared_with() -> None:
    left = iter(runs([2.0, 3.0, 3.0]))
    assert repeated(lambda: next(left))[1] == 3


def test_runs_that_never_repeat_are_told() -> None:
    left = iter(runs([2.0, 3.0, 2.0, 3.0, 3.0]))
    with pytest.raises(AssertionError, match="4 runs without offload.* 1 of 2 results.*\\[1\\]"):
        repeated(lambda: next(left))


def test_runs_with_other_numbers_of_results_differ() -> None:
    left = iter([runs([2.0])[0], runs([2.0])[0][:1]])
    with pytest.raises(AssertionError, match="2 runs without offload"):
        repeated(lambda: next(left), most=2)
