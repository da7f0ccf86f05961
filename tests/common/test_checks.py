"""What messages say of values and tensors, whatever these are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pp_offload._common.checks import brief, described, near, version_of


class Mute(Tensor):
    """Refuses every question."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("no")


ROWS = [torch.ones(2, 3), torch.ones(4, 3)]

TENSORS = {
    "dense": (torch.ones(2, 3), "a tensor of shape (2, 3), dtype torch.float32"),
    "coo": (torch.eye(4).to_sparse(), "shape (4, 4), dtype torch.float32, layout torch.sparse_coo"),
    "nested": (torch.nested.nested_tensor(ROWS), "a nested tensor of shape unknown, dtype torch."),
    "mute": (torch.ones(2).as_subclass(Mute), "a tensor of shape unknown, dtype unknown"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", TENSORS)
def test_any_tensor_can_be_described(name: str) -> None:
    tensor, words = TENSORS[name]
    assert words in described(tensor)
    assert version_of(tensor) == ("unknown" if name == "mute" else "0")


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("late", "'late'"),
        ({"a": 1}, "the dict {'a': 1}"),
        ([Broken()], "a list"),
        (torch.ones(1), "a Tensor"),
        (list(range(100)), "a list"),
        ("x" * 1000, "'" + "x" * 99 + "..."),
    ],
)
def test_a_value_is_said_in_a_few_words(value: object, words: str) -> None:
    assert brief(value) == words


def test_only_what_is_near_is_proposed() -> None:
    assert near("teirs", ["tiers", "verify"]) == " (did you mean tiers?)"
    assert near("zzz", ["tiers", "verify"]) == near(3, ["tiers"]) == ""
