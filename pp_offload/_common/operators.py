"""Reads and writes of operators on the bytes of their arguments, by their schemas.

schema = operator(torch.ops.aten.add_.Tensor)
schema.operands(args, kwargs)   # [(tensor, "write"), (other, "read"), ...]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

_ALLOCATES = ("empty", "new_empty")
_ONLY_WRITE = ("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_")
_TAKE_ROWS = ("embedding", "index", "index_select", "gather")
_METADATA_ONLY = (
    *("empty", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_empty", "new_zeros", "new_ones", "new_full"),
)
_DEPEND_ON_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Operator:
    """Facts of an operator, from the schema of its overload."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.label = str(func)
        aliases = [value.alias_info for value in schema.returns]
        name = schema.name.split("::")[-1]
        self.is_view = (  # or turns its argument into a view
            torch.Tag.inplace_view in func.tags
            or name == "_unsafe_view"  # whose schema says otherwise
            or any(alias is not None and not alias.is_write for alias in aliases)
        )
        self.is_allocation = name.startswith(_ALLOCATES)  # of memory that it does not write
        # Writes a tensor in place that it does not read, as a copy.
        self.only_writes = name in _ONLY_WRITE or any(arg.is_out for arg in schema.arguments)
        self.takes_rows = name in _TAKE_ROWS  # reads only rows that another tensor selects
        # The result, or its size, may depend on tensors' values.
        self.may_depend_on_data = not _DEPEND_ON_DATA.isdisjoint(func.tags)
        self._parameters: list[tuple[int, str, str]] = []
        for index, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._parameters.append((index, argument.name, "write"))
            elif not name.startswith(_METADATA_ONLY):
                self._parameters.append((index, argument.name, "read"))

    def operands(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Any, str]]:
        """Return arguments whose bytes the operator touches, each with ``read`` or ``write``."""
        num = len(args)
        return [
            (args[index] if index < num else kwargs.get(name), kind)
            for index, name, kind in self._parameters
        ]


operator = cache(Operator)
"""Return facts of an overload, made once: every operation of a program needs them."""
