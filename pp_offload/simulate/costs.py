"""How long operators take: the roofline of their operations and of the bytes they touch.

seconds = OperatorCosts(hardware).seconds(func, args, kwargs, outputs)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from pp_offload._common.operators import operator
from pp_offload.simulate.hardware import Hardware

aten = torch.ops.aten


class OperatorCosts:
    """Times of operators.

    Args:
        hardware: Its rates.
    """

    def __init__(self, hardware: Hardware) -> None:
        self._flops_per_s = hardware.matmul_flops * hardware.matmul_fraction
        self._bytes_per_s = hardware.memory_bytes_per_s * hardware.memory_fraction

    def seconds(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any
    ) -> float:
        """How long the device works.

        Args:
            func: The overload; no view.
            args: What it was called with.
            kwargs: By name.
            outputs: What it returned.
        """
        flops = flops_of(func, args, kwargs, outputs)
        touched = [value for value, _ in operator(func).operands(args, kwargs)]
        nbytes = bytes_of((touched, outputs))
        return max(flops / self._flops_per_s, nbytes / self._bytes_per_s)


def flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> float:
    """Floating point operations of matrix products, convolutions and attention; else none."""
    packet = func._overloadpacket
    attention = ATTENTION.get(packet)
    if attention is not None:
        return attention(*args, **kwargs)
    counted = flop_registry.get(packet)
    return 0.0 if counted is None else float(counted(*args, **kwargs, out_val=outputs))


def bytes_of(values: Any) -> int:
    """What is read and written: each tensor once."""
    tensors: Iterable[Tensor] = (one for one in tree_iter(values) if isinstance(one, Tensor))
    distinct = {id(one): one for one in tensors}
    return sum(one.nbytes for one in distinct.values())


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


ATTENTION: dict[Any, Callable[..., float]] = {
    aten._scaled_dot_product_flash_attention: _forward,
    aten._scaled_dot_product_flash_attention_backward: _backward,
}
"""Counted here: ``flop_counter`` takes no account of causal masks, or of heads that share keys."""
