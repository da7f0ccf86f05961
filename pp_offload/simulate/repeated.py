"""Operators that a step calls again and again with the same sizes are worked out once.

Without data, what an operator returns and how long it takes depends on the sizes, strides and
dtypes of what it is called with, and on its other arguments. PyTorch works that out in Python for
many operators, which takes longer than all else here.

    calls = RepeatedCalls(OperatorCosts(hardware))
    outputs, seconds = calls.run(func, args, kwargs)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from pp_offload._common.operators import operator
from pp_offload.simulate.costs import OperatorCosts

PLAIN = (Tensor, nn.Parameter)
MAX_CALLS = 10_000
"""So many are remembered, for programs whose sizes never repeat."""

Key = tuple[Any, ...]
Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True)
class Known:
    """What a call came to."""

    layouts: tuple[Layout | None, ...]
    """Of its outputs, each new memory; None for one that is None."""
    is_single: bool
    """Whether it returns one tensor, and no tuple."""
    seconds: float

    def outputs(self) -> Any:
        """As the operator would return them."""
        found = tuple(
            None if one is None else torch.empty_strided(*one[:2], dtype=one[2], device="meta")
            for one in self.layouts
        )
        return found[0] if self.is_single else found


class RepeatedCalls:
    """Runs operators, or says what they returned before.

    Args:
        costs: How long they take.
    """

    def __init__(self, costs: OperatorCosts) -> None:
        self._costs = costs
        self._known: dict[Key, Known] = {}

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, float]:
        """Outputs, and how long the device works on them.

        Args:
            func: The overload; no view.
            args: What it is called with.
            kwargs: By name.
        """
        key = _key(func, args, kwargs) if is_repeatable(func) else None
        known = None if key is None else self._known.get(key)
        if known is not None:
            return known.outputs(), known.seconds
        outputs = func(*args, **kwargs)
        seconds = self._costs.seconds(func, args, kwargs, outputs)
        layouts = None if key is None else _layouts(outputs)
        if key is not None and layouts is not None and len(self._known) < MAX_CALLS:
            self._known[key] = Known(layouts, isinstance(outputs, Tensor), seconds)
        return outputs, seconds


@cache
def is_repeatable(func: Any) -> bool:
    """Whether it changes nothing, and returns nothing that it was given, as its schema says."""
    arguments = func._schema.arguments
    kinds = [kind for _, kind in operator(func).operands([None] * len(arguments), {})]
    return "read" in kinds and "write" not in kinds and not operator(func).is_view


def _key(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Key | None:
    """All that the outputs and the time depend on; None where something unknown is among it."""
    tensors: dict[int, int] = {}
    try:
        said = _said(args, tensors), _said([*kwargs.items()], tensors)
    except TypeError:
        return None
    return (func, torch.get_default_dtype(), *said) if tensors else None


def _said(value: Any, tensors: dict[int, int]) -> Any:
    """A value as part of a key. The same tensor twice is not two tensors of the same sizes.

    Raises:
        TypeError: It cannot be part of one.
    """
    if type(value) in PLAIN and value.is_meta and value.layout is torch.strided:
        number = tensors.setdefault(id(value), len(tensors))
        nbytes = value.untyped_storage().nbytes()
        return number, value.shape, value.stride(), value.dtype, value.storage_offset(), nbytes
    if isinstance(value, list | tuple):
        return tuple([_said(one, tensors) for one in value])
    if isinstance(value, Tensor):
        raise TypeError("of a kind that is not looked into")
    hash(value)
    return type(value), value


def _layouts(outputs: Any) -> tuple[Layout | None, ...] | None:
    """None unless each is a tensor that has a storage of its own, just as large as it has to be."""
    if not isinstance(outputs, Tensor | tuple):
        return None
    found: list[Layout | None] = []
    storages = set()
    for one in (outputs,) if isinstance(outputs, Tensor) else outputs:
        if one is None:
            found.append(None)
            continue
        if type(one) is not Tensor or not one.is_meta or one.layout is not torch.strided:
            return None
        layout = one.shape, one.stride(), one.dtype
        like = torch.empty_strided(*layout[:2], dtype=one.dtype, device="meta")
        if (
            one.storage_offset()
            or like.untyped_storage().nbytes() != one.untyped_storage().nbytes()
        ):
            return None
        storages.add(one.untyped_storage()._cdata)
        found.append(layout)
    return tuple(found) if len(storages) == len(found) - found.count(None) else None
