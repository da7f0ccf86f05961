"""Times of operators: measured, or by the roofline of operations and bytes touched.

seconds = OperatorCosts(hardware).seconds(func, args, kwargs, outputs)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from pp_offload._common.checks import check_all, check_kind, said
from pp_offload._common.operators import Operator, operator
from pp_offload._common.torch_private import OpOverload, OpOverloadPacket
from pp_offload._memory.storages import has_storage
from pp_offload.simulate.hardware import Hardware, is_number

aten = torch.ops.aten

Measured = Callable[[Any, Sequence[Any], Mapping[str, Any], Any], float | None]
"""Given an overload, its arguments, those by name and its outputs; seconds, or None."""

OperatorSeconds = Mapping[OpOverload[..., Any] | OpOverloadPacket[..., Any], float] | Measured
"""A table by operator, or a function."""


class OperatorCosts:
    """Times of operators.

    Args:
        hardware: Its rates.
        operator_seconds: Measured times, which replace the roofline for the operators they name.

    Raises:
        TypeError: ``operator_seconds`` is neither a table of operators nor a function.
        ValueError: A time in it is no number of at least 0.
    """

    def __init__(self, hardware: Hardware, operator_seconds: OperatorSeconds | None = None) -> None:
        self._measured = _measured({} if operator_seconds is None else operator_seconds)
        self._bytes_per_s = hardware.memory_bytes_per_s * hardware.memory_fraction
        self._gap_s = hardware.kernel_gap_s
        products = hardware.matmul_fraction
        forward = hardware.attention_fraction or products
        backward = hardware.attention_backward_fraction or products
        self._flops_per_s = hardware.matmul_flops * products
        self._attention = dict.fromkeys(FORWARDS, hardware.matmul_flops * forward)
        self._attention |= dict.fromkeys(BACKWARDS, hardware.matmul_flops * backward)

    def seconds(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any
    ) -> float:
        """Time of an overload that is no view, with the gap before the next operator.

        Raises:
            ValueError: The function of measured times returned no number of at least 0.
        """
        measured = self._measured(func, args, kwargs, outputs)
        if measured is not None:
            check_all(_time_problem(func, measured))
            return self._gap_s + measured
        flops = flops_of(func, args, kwargs, outputs)
        nbytes = bytes_of(operator(func), args, kwargs, outputs)
        flops_per_s = self._attention.get(func._overloadpacket, self._flops_per_s)
        return self._gap_s + max(flops / flops_per_s, nbytes / self._bytes_per_s)


def _measured(given: OperatorSeconds) -> Measured:
    """Return the table as a function, or the function itself."""
    if not isinstance(given, Mapping):
        if not callable(given):
            check_kind("operator_seconds", given, Mapping, "a table by operator, or a function")
        return given
    kinds = OpOverload, OpOverloadPacket
    for key in given:
        name = "an operator of operator_seconds"
        check_kind(name, key, kinds, "one of torch.ops", "write torch.ops.aten.mm")
    check_all(*(_time_problem(key, value) for key, value in given.items()))
    table = dict(given)

    def look_up(func: Any, args: Any, kwargs: Any, outputs: Any) -> float | None:
        return table.get(func, table.get(func._overloadpacket))

    return look_up


def _time_problem(func: object, value: object) -> str | None:
    if is_number(value) and 0 <= value < inf:  # type: ignore[operator]
        return None
    return f"operator_seconds of {func} are {said(value)}, expected a number of at least 0"


def flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> float:
    """Floating point operations of matrix products, convolutions and attention; else 0."""
    packet = func._overloadpacket
    count = COUNTED.get(packet)
    if count is not None:
        return count(*args, **kwargs)
    count = flop_registry.get(packet)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=outputs))


def bytes_of(schema: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> int:
    """Bytes read and written: each tensor counts once, and one changed in place twice.

    An expanded tensor is as large as its storage. Of a table, only the rows taken count.
    """
    read: dict[int, Tensor] = {}
    written: dict[int, Tensor] = {id(tensor): tensor for tensor in tensors_in(outputs)}
    for value, kind in schema.operands(args, kwargs):
        for tensor in tensors_in(value):
            if kind == "write":
                written[id(tensor)] = tensor
            if kind == "read" or not schema.only_writes:
                read[id(tensor)] = tensor
    if schema.takes_rows:
        read = {key: tensor for key, tensor in read.items() if not tensor.is_floating_point()}
        read |= {-key: tensor for key, tensor in written.items()}  # as many bytes as it writes
    touched = [*read.values(), *written.values()]
    return sum(min(tensor.nbytes, _storage_bytes(tensor)) for tensor in touched)


def tensors_in(value: Any) -> list[Tensor]:
    """Yield the tensors among arguments or outputs, and in lists among these."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def _storage_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() if has_storage(tensor) else tensor.nbytes


# Operations that flop_counter counts otherwise: it takes no account of causal masks, of heads that
# share keys, or of products in groups.


def _attention(num_products: int, *, query_at: int, causal_at: int) -> Callable[..., float]:
    """Make a count of attention's operations for each query head; half as many if causal.

    Args:
        num_products: Number of products of scores with rows.
        query_at: Position of ``query`` in its schema; ``key`` is next.
        causal_at: Position of ``is_causal``.
    """

    def flops(*args: Any, **kwargs: Any) -> float:
        query, key = args[query_at : query_at + 2]
        default = kwargs.get("is_causal", False)
        is_causal = args[causal_at] if len(args) > causal_at else default
        batch, heads, queries, width = query.shape
        whole = 2.0 * num_products * batch * heads * queries * key.shape[-2] * width
        return whole / 2 if is_causal else whole

    return flops


def _grouped(rows: Tensor, columns: Tensor, *rest: Any, **more: Any) -> float:
    """Count products in groups: each row, or each column, meets the matrix of its group alone."""
    num_matrices = rows.shape[0] if rows.dim() == columns.dim() == 3 else 1
    return 2.0 * num_matrices * rows.shape[-2] * rows.shape[-1] * columns.shape[-1]


FORWARDS: dict[Any, Callable[..., float]] = {
    aten._scaled_dot_product_flash_attention: _attention(2, query_at=0, causal_at=4),
    aten._scaled_dot_product_efficient_attention: _attention(2, query_at=0, causal_at=6),
}
BACKWARDS: dict[Any, Callable[..., float]] = {
    aten._scaled_dot_product_flash_attention_backward: _attention(5, query_at=1, causal_at=11),
    aten._scaled_dot_product_efficient_attention_backward: _attention(5, query_at=1, causal_at=11),
}
COUNTED = {aten._grouped_mm: _grouped, **FORWARDS, **BACKWARDS}
