"""What an operator returned is returned again for the same sizes, and for no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pp_offload.simulate import DEVICES
from pp_offload.simulate.costs import OperatorCosts, tensors_in
from pp_offload.simulate.repeated import RepeatedCalls, is_repeatable

aten = torch.ops.aten
COSTS = OperatorCosts(DEVICES["H100"])


def meta(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(size, device="meta", dtype=dtype)


X, Y, SMALL = meta(64, 32), meta(64, 32), meta(32)
CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "one output": (aten.mul.Tensor, (X, Y)),
    "the same twice": (aten.mul.Tensor, (X, X)),
    "another number": (aten.mul.Tensor, (X, 2)),
    "of another type": (aten.mul.Tensor, (meta(64, 32, dtype=torch.int32), 2)),
    "a float": (aten.mul.Tensor, (meta(64, 32, dtype=torch.int32), 2.0)),
    "a bool": (aten.mul.Tensor, (meta(64, 32, dtype=torch.int32), True)),
    "transposed": (aten.mul.Tensor, (X.t(), Y.t())),
    "expanded": (aten.mul.Tensor, (SMALL.expand(64, 32), Y)),
    "broadcast": (aten.mul.Tensor, (SMALL, Y)),
    "another dtype": (aten.mul.Tensor, (X.float(), Y)),
    "a product": (aten.mm.default, (X, Y.t())),
    "several outputs": (aten.native_layer_norm.default, (X, [32], SMALL, None, 1e-5)),
    "a list": (aten.cat.default, ([X, Y, X],)),
    "another list": (aten.cat.default, ([X, Y], 1)),
    "rows": (aten.index_select.default, (X, 0, meta(7, dtype=torch.int64))),
    "some outputs": (
        aten.native_layer_norm_backward.default,
        (X, Y, [32], meta(64, 1).float(), meta(64, 1).float(), SMALL, None, [True, True, False]),
    ),
}


def layout(outputs: Any) -> list[Any]:
    single = (outputs,) if isinstance(outputs, Tensor) else outputs
    return [
        None
        if one is None
        else (one.shape, one.stride(), one.dtype, one.untyped_storage().nbytes())
        for one in single
    ]


def test_each_call_gives_what_it_gives_alone() -> None:
    """All by one object, each three times, in two orders; beside one that has seen nothing."""
    together = RepeatedCalls(COSTS)
    for names in (CALLS, reversed(CALLS), CALLS):
        for name in names:
            func, args = CALLS[name]
            outputs, seconds = together.run(func, args, {})
            expected, expected_s = RepeatedCalls(COSTS).run(func, args, {})
            assert type(outputs) is type(expected), name
            assert layout(outputs) == layout(expected), name
            assert seconds == expected_s > 0, name
    assert len(together._known) == len(CALLS), "no two of them are the same"


def test_outputs_are_new_memory_each_time() -> None:
    calls = RepeatedCalls(COSTS)
    found = [calls.run(*CALLS["several outputs"], {})[0] for _ in range(3)]
    assert len({one.untyped_storage()._cdata for one in tensors_in(found)}) == 9


IN_PLACE: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {
    "in place": lambda: (aten.add_.Tensor, (meta(4), meta(4))),
    "of a list in place": lambda: (aten._foreach_add_.List, ([meta(4)], [meta(4)])),
    "out": lambda: (aten.add.out, (meta(4), meta(4))),
    "a view": lambda: (aten.view.default, (meta(4), [2, 2])),
    "new memory": lambda: (aten.empty_like.default, (meta(4),)),
}


@pytest.mark.parametrize("kind", IN_PLACE)
def test_what_is_changed_or_shared_is_never_remembered(kind: str) -> None:
    assert not is_repeatable(IN_PLACE[kind]()[0])
    assert is_repeatable(aten.add.Tensor)


def test_a_call_that_fails_fails_again() -> None:
    calls = RepeatedCalls(COSTS)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            calls.run(aten.mm.default, (meta(2, 3), meta(2, 3)), {})
    assert not calls._known


def test_a_kind_of_tensor_that_is_not_looked_into_is_not_remembered() -> None:
    calls, kind = RepeatedCalls(COSTS), type("Kind", (Tensor,), {})
    x = torch.Tensor._make_subclass(kind, meta(4, dtype=torch.float32))
    for given in (x, torch.ones(4)):
        calls.run(aten.mul.Tensor, (given, given), {})
    assert not calls._known


def test_what_returns_no_tensors_is_called_each_time() -> None:
    calls = RepeatedCalls(COSTS)
    enter = torch.ops.profiler._record_function_enter_new.default
    found = [calls.run(enter, ("a step",), {})[0] for _ in range(2)]
    assert not isinstance(found[0], Tensor)
    calls.run(aten._foreach_add.Scalar, ([meta(4)], 1), {})
    assert not calls._known


def test_the_default_dtype_is_part_of_a_call() -> None:
    calls, whole = RepeatedCalls(COSTS), meta(4, dtype=torch.int32)
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            assert calls.run(aten.div.Tensor, (whole, 2), {})[0].dtype is dtype
    finally:
        torch.set_default_dtype(before)


def test_no_more_are_remembered_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pp_offload.simulate.repeated.MAX_CALLS", 3)
    calls = RepeatedCalls(COSTS)
    for length in range(1, 10):
        assert calls.run(aten.neg.default, (meta(length),), {})[0].shape == (length,)
    assert len(calls._known) == 3
