"""Operators return for the same sizes what they returned before, and for no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pp_offload.simulate import DEVICES
from pp_offload.simulate.costs import OperatorCosts, makes_new_memory, tensors_in

aten = torch.ops.aten
H100 = DEVICES["H100"]


def meta(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(size, device="meta", dtype=dtype)


X, Y, SMALL, WHOLE = meta(64, 32), meta(64, 32), meta(32), meta(64, 32, dtype=torch.int32)
CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "a tensor": (aten.mul.Tensor, (X, Y)),
    "the same twice": (aten.mul.Tensor, (X, X)),
    "a number": (aten.mul.Tensor, (WHOLE, 2)),
    "a float": (aten.mul.Tensor, (WHOLE, 2.0)),
    "a bool": (aten.mul.Tensor, (WHOLE, True)),
    "transposed": (aten.mul.Tensor, (X.t(), Y.t())),
    "expanded": (aten.mul.Tensor, (SMALL.expand(64, 32), Y)),
    "broadcast": (aten.mul.Tensor, (SMALL, Y)),
    "another dtype": (aten.mul.Tensor, (X.float(), Y)),
    "several outputs": (aten.native_layer_norm.default, (X, [32], SMALL, None, 1e-5)),
    "a list": (aten.cat.default, ([X, Y, X],)),
    "another list": (aten.cat.default, ([X, Y], 1)),
    "some outputs": (
        aten.native_layer_norm_backward.default,
        (X, Y, [32], meta(64, 1).float(), meta(64, 1).float(), SMALL, None, [True, True, False]),
    ),
}


def layout(outputs: Any) -> list[Any]:
    tensors = (outputs,) if isinstance(outputs, Tensor) else outputs
    return [
        x if x is None else (x.shape, x.stride(), x.dtype, x.untyped_storage().nbytes())
        for x in tensors
    ]


def test_each_call_returns_what_it_returns_alone() -> None:
    """All calls by one object, each three times, in two orders; beside a new object."""
    together, outputs_of_all = OperatorCosts(H100), []
    for names in (CALLS, reversed(CALLS), CALLS):
        for name in names:
            outputs, seconds = together.run(*CALLS[name], {})
            expected, expected_s = OperatorCosts(H100).run(*CALLS[name], {})
            assert layout(outputs) == layout(expected), name
            assert seconds == expected_s > 0, name
            outputs_of_all += tensors_in(outputs)
    assert len(together._results) == len(CALLS), "no two of them are the same"
    storages = {tensor.untyped_storage()._cdata for tensor in outputs_of_all}
    assert len(storages) == len(outputs_of_all), "new memory each time"


@pytest.mark.parametrize(
    "func",
    [aten.add_.Tensor, aten._foreach_add_.List, aten.add.out, aten.view.default],
    ids=str,
)
def test_an_operator_that_changes_or_shares_memory_runs_each_time(func: Any) -> None:
    assert not makes_new_memory(func)
    assert makes_new_memory(aten.add.Tensor)


def test_other_calls_run_each_time() -> None:
    calls, kind = OperatorCosts(H100), type("Kind", (Tensor,), {})
    x = torch.Tensor._make_subclass(kind, meta(4, dtype=torch.float32))
    for given in (x, torch.ones(4)):
        calls.run(aten.mul.Tensor, (given, given), {})
    calls.run(aten._foreach_add.Scalar, ([meta(4)], 1), {})
    with pytest.raises(RuntimeError):
        calls.run(aten.mm.default, (meta(2, 3), meta(2, 3)), {})
    assert not calls._results
