"""How long operators take where somebody measured it.

measured = measured_times({torch.ops.aten.mm: 1.3e-3})
measured(func, args, kwargs, outputs)  # seconds; None for what was not measured
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

from pp_offload._common.checks import check_all, check_kind, said
from pp_offload._common.torch_private import OpOverload, OpOverloadPacket

Measured = Callable[[Any, Sequence[Any], Mapping[str, Any], Any], float | None]
"""Given an overload, its arguments, those by name and its outputs; seconds, or None."""

OperatorSeconds = Mapping[OpOverload[..., Any] | OpOverloadPacket[..., Any], float] | Measured
"""A table by operator, or a function."""


def measured_times(given: OperatorSeconds) -> Measured:
    """Both as a function that has been checked, or checks.

    Raises:
        TypeError: It is neither a table of operators nor a function.
        ValueError: A time is no number of at least 0; for a function, when it returns that.
    """
    if isinstance(given, Mapping):
        return _looked_up(given)
    if not callable(given):
        check_kind("operator_seconds", given, Mapping, "a table by operator, or a function")

    def called(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> float | None:
        seconds = given(func, args, kwargs, out)
        if seconds is not None:
            check_all(_problem(func, seconds))
        return seconds

    return called


def _looked_up(table: Mapping[Any, float]) -> Measured:
    for key in table:
        check_kind(
            "an operator of operator_seconds",
            key,
            (OpOverload, OpOverloadPacket),
            "one of torch.ops",
            "write torch.ops.aten.mm",
        )
    check_all(*(_problem(key, value) for key, value in table.items()))
    known = dict(table)

    def found(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> float | None:
        return known.get(func, known.get(func._overloadpacket))

    return found


def _problem(operator: object, value: object) -> str | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and 0 <= value < inf:  # type: ignore[operator]
        return None
    return f"operator_seconds of {operator} are {said(value)}, expected a number of at least 0"
