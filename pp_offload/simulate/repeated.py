"""Cache of operators, which a step calls again and again with the same sizes.

Without data, outputs and time of an operator depend on the sizes, strides and dtypes of its
tensors, and on its other arguments. PyTorch works outputs out in Python for many operators: steps
of a Llama take four times as long without this.

    calls = RepeatedCalls(OperatorCosts(hardware))
    outputs, seconds = calls.run(func, args, kwargs)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pp_offload._common.operators import operator
from pp_offload.simulate.costs import OperatorCosts

MAX_CALLS = 10_000
"""Bound on calls that are remembered, for programs whose sizes never repeat."""

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


class Result(NamedTuple):
    """Outputs and time of a call."""

    layouts: tuple[Layout | None, ...]
    """One for each output, all new memory; None for an output that is None."""

    is_single: bool
    """Whether the operator returns a tensor, and no tuple."""

    seconds: float

    def outputs(self) -> Any:
        """Make new outputs, as the operator would return them."""
        tensors = tuple(None if layout is None else _empty(layout) for layout in self.layouts)
        return tensors[0] if self.is_single else tensors


class RepeatedCalls:
    """Cache of operators that are no views, by their arguments."""

    def __init__(self, costs: OperatorCosts) -> None:
        self._costs = costs
        self._results: dict[Any, Result] = {}

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, float]:
        """Run a call, and return its outputs and its time on the device."""
        key = _key(func, args, kwargs) if makes_new_memory(func) else None
        if key in self._results:
            result = self._results[key]
            return result.outputs(), result.seconds
        outputs = func(*args, **kwargs)
        seconds = self._costs.seconds(func, args, kwargs, outputs)
        layouts = None if key is None else _layouts(outputs)
        if layouts is not None and len(self._results) < MAX_CALLS:
            self._results[key] = Result(layouts, isinstance(outputs, Tensor), seconds)
        return outputs, seconds


@cache
def makes_new_memory(func: Any) -> bool:
    """Whether an operator changes nothing, and returns nothing that it was given, by its schema."""
    kinds = [kind for _, kind in operator(func).operands([None] * len(func._schema.arguments), {})]
    return "read" in kinds and "write" not in kinds and not operator(func).is_view


def _key(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Key of a call, on which outputs and time depend; None if an argument has no key."""
    numbers: dict[int, int] = {}  # the same tensor twice is not two tensors of the same sizes

    def part(value: Any) -> Any:
        if type(value) in (Tensor, nn.Parameter) and value.is_meta and is_strided(value):
            number = numbers.setdefault(id(value), len(numbers))
            nbytes = value.untyped_storage().nbytes()
            layout = value.shape, value.stride(), value.dtype
            return number, layout, value.storage_offset(), nbytes
        if isinstance(value, list | tuple):
            return tuple([part(item) for item in value])
        if isinstance(value, Tensor):
            raise TypeError("a tensor of another kind")
        hash(value)
        return type(value), value

    try:
        parts = part(args), part([*kwargs.items()])
    except TypeError:
        return None
    return (func, torch.get_default_dtype(), parts) if numbers else None


def _layouts(outputs: Any) -> tuple[Layout | None, ...] | None:
    """Layouts of outputs; None unless each output fills a storage of its own."""
    if not isinstance(outputs, Tensor | tuple):
        return None
    layouts: list[Layout | None] = []
    storages = set()
    for tensor in (outputs,) if isinstance(outputs, Tensor) else outputs:
        if tensor is None:
            layouts.append(None)
            continue
        if type(tensor) is not Tensor or not tensor.is_meta or not is_strided(tensor):
            return None
        layout, storage = (tensor.shape, tensor.stride(), tensor.dtype), tensor.untyped_storage()
        nbytes = _empty(layout).untyped_storage().nbytes()
        if tensor.storage_offset() or nbytes != storage.nbytes() or storage._cdata in storages:
            return None
        storages.add(storage._cdata)
        layouts.append(layout)
    return tuple(layouts)


def is_strided(tensor: Tensor) -> bool:
    """Whether a tensor is strided, and not sparse."""
    return tensor.layout is torch.strided


def _empty(layout: Layout) -> Tensor:
    size, stride, dtype = layout
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")
