"""What messages say of values and tensors, whatever these are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pp_offload._common.checks import brief, described, near


class Mute(Tensor):
    """Refuses every question."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("no")


def test_any_tensor_can_be_described() -> None:
    assert described(torch.ones(2, 3)) == "a tensor of shape (2, 3), dtype torch.float32"
    assert described(torch.ones(2).as_subclass(Mute)) == "a Mute"


def test_a_value_is_said_in_a_few_words() -> None:
    assert brief(torch.ones(1)) == "a Tensor"
    assert brief([*range(100)]) == "a list"
    assert brief("x" * 1000) == "'" + "x" * 99 + "..."


def test_only_what_is_near_is_proposed() -> None:
    assert near("teirs", ["tiers", "verify"]) == " (did you mean tiers?)"
    assert near("zzz", ["tiers", "verify"]) == near(3, ["tiers"]) == ""
