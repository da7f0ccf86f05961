"""How long operators take: what was measured, or the roofline of operations and bytes touched.

seconds = OperatorCosts(hardware).seconds(func, args, kwargs, outputs)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from pp_offload._common.operators import Operator, operator
from pp_offload._memory.storages import has_storage
from pp_offload.simulate.hardware import Hardware
from pp_offload.simulate.measured import OperatorSeconds, measured_times

aten = torch.ops.aten


class OperatorCosts:
    """Times of operators.

    Args:
        hardware: Its rates.
        measured: Times that count instead, of the operators that have one.
    """

    def __init__(self, hardware: Hardware, measured: OperatorSeconds | None = None) -> None:
        self._measured = measured_times({} if measured is None else measured)
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
        """How long the device works, and is idle before the next operator.

        Args:
            func: The overload; no view.
            args: What it was called with.
            kwargs: By name.
            outputs: What it returned.
        """
        measured = self._measured(func, args, kwargs, outputs)
        if measured is not None:
            return self._gap_s + measured
        flops = flops_of(func, args, kwargs, outputs)
        nbytes = bytes_of(operator(func), args, kwargs, outputs)
        flops_per_s = self._attention.get(func._overloadpacket, self._flops_per_s)
        return self._gap_s + max(flops / flops_per_s, nbytes / self._bytes_per_s)


def flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> float:
    """Floating point operations of matrix products, convolutions and attention; else none."""
    packet = func._overloadpacket
    ours = COUNTED.get(packet)
    if ours is not None:
        return ours(*args, **kwargs)
    counted = flop_registry.get(packet)
    return 0.0 if counted is None else float(counted(*args, **kwargs, out_val=outputs))


def bytes_of(schema: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> int:
    """What is read and written: each tensor once, and one that is changed in place twice.

    An expanded tensor is as large as its storage. Of a table, only the rows that are taken count.
    """
    read: dict[int, Tensor] = {}
    written: dict[int, Tensor] = {id(one): one for one in tensors_in(outputs)}
    for value, kind in schema.operands(args, kwargs):
        for one in tensors_in(value):
            if kind == "write":
                written[id(one)] = one
            if kind == "read" or not schema.only_writes:
                read[id(one)] = one
    if schema.takes_rows:
        read = {key: one for key, one in read.items() if not one.is_floating_point()}
        read |= {-key: one for key, one in written.items()}  # as many bytes as it writes
    touched = [*read.values(), *written.values()]
    return sum(min(one.nbytes, _storage_bytes(one)) for one in touched)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors among arguments or outputs, and in lists among them."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for one in value for tensor in tensors_in(one)]
    return []


def _storage_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() if has_storage(tensor) else tensor.nbytes


def _attention(query: Tensor, key: Tensor, num_products: int, *, is_causal: bool) -> float:
    """So many products of the scores with rows, for each query head; half of each if causal."""
    batch, heads, queries, width = query.shape
    flops = 2.0 * num_products * batch * heads * queries * key.shape[-2] * width
    return flops / 2 if is_causal else flops


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *rest: Any,
    **more: Any,
) -> float:
    return _attention(query, key, 2, is_causal=is_causal)


def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: Any,
    max_k: Any,
    dropout_p: float,
    is_causal: bool,
    *rest: Any,
    **more: Any,
) -> float:
    return _attention(query, key, 5, is_causal=is_causal)


def _efficient_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> float:
    return _attention(query, key, 2, is_causal=is_causal)


def _efficient_backward(
    gradient: Tensor, query: Tensor, key: Tensor, *rest: Any, **more: Any
) -> float:
    is_causal = rest[8] if len(rest) > 8 else more.get("is_causal", False)
    return _attention(query, key, 5, is_causal=is_causal)


def _grouped(left: Tensor, right: Tensor, *rest: Any, **more: Any) -> float:
    """Each row, or each column, meets the matrix of its group alone."""
    num_matrices = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return 2.0 * num_matrices * left.shape[-2] * left.shape[-1] * right.shape[-1]


FORWARDS: dict[Any, Callable[..., float]] = {
    aten._scaled_dot_product_efficient_attention: _efficient_forward,
    aten._scaled_dot_product_flash_attention: _forward,
}
BACKWARDS: dict[Any, Callable[..., float]] = {
    aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,
    aten._scaled_dot_product_flash_attention_backward: _backward,
}
COUNTED = {aten._grouped_mm: _grouped, **FORWARDS, **BACKWARDS}
"""Counted here: ``flop_counter`` takes no account of causal masks, of heads that share keys, or of
products in groups.
"""
