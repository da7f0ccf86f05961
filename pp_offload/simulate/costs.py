"""Operators of an accelerator on tensors without data: times and kernels.

    with accelerator_kernels():
        outputs, seconds = OperatorCosts(hardware).run(func, args, kwargs)

Times are measured, or come from a roofline of operations and bytes touched.

NOTE [ Repeated calls ]
    A step calls operators again and again with the same sizes. Without data, outputs and time of an
    operator depend on the sizes, strides and dtypes of its tensors, and on its other arguments.
    PyTorch works outputs out in Python for many operators: steps of a Llama take four times as long
    without a cache.

NOTE [ Kernels ]
    On ``meta`` PyTorch computes attention from matrix products, which saves the scores, saves the
    mask of a dropout as numbers, and an RMS norm's input in float32. Accelerators do none of that.
    So attention takes the flash kernel or the memory-efficient one, where they can compute it,
    dropout the fused one, and an RMS norm what a layer norm takes. A mode for functions is not
    active while autograd recomputes a checkpoint, so the operators themselves are replaced, for
    ``meta`` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from pp_offload._common.operators import Operator, operator
from pp_offload._memory.addresses import has_storage
from pp_offload.simulate.hardware import Hardware, check_number

aten = torch.ops.aten

OperatorSeconds = Callable[[Any, Sequence[Any], Mapping[str, Any], Any], float | None]
"""Given an overload, its arguments, its named arguments and its outputs; seconds, or None."""

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


class OperatorCosts:
    """Times of operators. Measured ``operator_seconds`` replace the roofline for theirs."""

    def __init__(self, hardware: Hardware, operator_seconds: OperatorSeconds | None = None) -> None:
        self._measured, self._gap_s = operator_seconds, hardware.kernel_gap_s
        self._bytes_per_s = hardware.memory_bytes_per_s * hardware.memory_fraction
        products = hardware.matmul_fraction
        forward = hardware.attention_fraction or products
        backward = hardware.attention_backward_fraction or products
        self._flops_per_s = hardware.matmul_flops * products
        self._attention = dict.fromkeys(FORWARDS, hardware.matmul_flops * forward)
        self._attention |= dict.fromkeys(BACKWARDS, hardware.matmul_flops * backward)
        self._results: dict[Any, tuple[Callable[[], Any], float]] = {}

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, float]:
        """Run an overload that is no view; return its outputs, and its time with the gap after it.
        See NOTE [ Repeated calls ].
        """
        key = _key(func, args, kwargs) if makes_new_memory(func) else None
        if key in self._results:
            make, seconds = self._results[key]
            return make(), seconds
        outputs = func(*args, **kwargs)
        took_s = None if self._measured is None else self._measured(func, args, kwargs, outputs)
        if took_s is None:
            packet = func._overloadpacket
            count = COUNTED.get(packet) or flop_registry.get(packet)
            flops = 0.0 if count is None else float(count(*args, **kwargs, out_val=outputs))
            nbytes = bytes_of(operator(func), args, kwargs, outputs)
            flops_per_s = self._attention.get(packet, self._flops_per_s)
            took_s = max(flops / flops_per_s, nbytes / self._bytes_per_s)
        else:
            check_number(f"operator_seconds of {func}", took_s, may_be_zero=True)
        seconds, maker = self._gap_s + took_s, None if key is None else _maker_of(outputs)
        if maker is not None:
            self._results[key] = maker, seconds
        return outputs, seconds


@cache
def makes_new_memory(func: Any) -> bool:
    """Whether an operator, by its schema, changes no argument and returns none."""
    kinds = [kind for _, kind in operator(func).operands([None] * len(func._schema.arguments), {})]
    return "read" in kinds and "write" not in kinds and not operator(func).is_view


def _key(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return a key of all that outputs and time depend on; None if an argument has no key."""
    numbers: dict[int, int] = {}  # the same tensor twice differs from two tensors of the same sizes

    def part(value: Any) -> Any:
        if isinstance(value, Tensor):
            if not is_plain(value):
                raise TypeError("a tensor of another kind")
            number = numbers.setdefault(id(value), len(numbers))
            nbytes = value.untyped_storage().nbytes()
            return number, _layout(value), value.storage_offset(), nbytes
        if isinstance(value, list | tuple):
            return tuple([part(item) for item in value])
        hash(value)
        return type(value), value

    try:
        parts = part(args), part([*kwargs.items()])
    except TypeError:
        return None
    return (func, torch.get_default_dtype(), parts) if numbers else None


def _maker_of(outputs: Any) -> Callable[[], Any] | None:
    """Return a function that makes equal outputs; None unless each fills a storage of its own."""
    is_tuple = isinstance(outputs, tuple)
    every = outputs if is_tuple else [outputs]
    tensors = [each for each in every if each is not None]
    if not tensors or not all(isinstance(x, Tensor) and is_plain(x) for x in tensors):
        return None
    storages = {tensor.untyped_storage()._cdata for tensor in tensors}
    sizes = [tensor.untyped_storage().nbytes() for tensor in tensors]
    filled = [_empty(_layout(tensor)).untyped_storage().nbytes() for tensor in tensors]
    if len(storages) < len(tensors) or sizes != filled or any(x.storage_offset() for x in tensors):
        return None
    layouts = [None if each is None else _layout(each) for each in every]

    def make() -> Any:  # without a reference to the outputs, which own memory
        made = [None if layout is None else _empty(layout) for layout in layouts]
        return tuple(made) if is_tuple else made[0]

    return make


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has no data, no subclass, and is not sparse."""
    return has_storage(tensor) and tensor.is_meta


def _layout(tensor: Tensor) -> Layout:
    return tensor.shape, tensor.stride(), tensor.dtype


def _empty(layout: Layout) -> Tensor:
    size, stride, dtype = layout
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")


def bytes_of(schema: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> int:
    """Return bytes read and written: each tensor counts once, a tensor changed in place twice.
    An expanded tensor is as large as its storage. Of a table, only the selected rows count.
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
    whole = [x.untyped_storage().nbytes() if has_storage(x) else x.nbytes for x in touched]
    return sum(min(x.nbytes, nbytes) for x, nbytes in zip(touched, whole, strict=True))


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors among arguments or outputs, and in lists among these."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


# Operations that flop_counter counts differently: it ignores causal masks, heads that share
# keys, and grouped products.


def _attention(num_products: int, *, query_at: int, causal_at: int) -> Callable[..., float]:
    """Make a count of attention's operations, halved if causal; ``key`` follows ``query``."""

    def flops(*args: Any, **kwargs: Any) -> float:
        query, key = args[query_at : query_at + 2]
        default = kwargs.get("is_causal", False)
        is_causal = args[causal_at] if len(args) > causal_at else default
        batch, heads, queries, width = query.shape
        whole = 2.0 * num_products * batch * heads * queries * key.shape[-2] * width
        return whole / 2 if is_causal else whole

    return flops


def _grouped(rows: Tensor, columns: Tensor, *rest: Any, **more: Any) -> float:
    """Count grouped products: each row, or each column, meets only the matrix of its group."""
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


# Kernels

MAX_HEAD_WIDTH = 256  # of the flash kernel
ALIGNMENT_BYTES = 16  # heads of the memory-efficient kernel take a multiple of this
_entered: list[torch.library.Library] = []


@contextmanager
def accelerator_kernels() -> Iterator[None]:
    """Inside the context, run an accelerator's kernels on ``meta``, on every thread; see
    NOTE [ Kernels ].

    Raises:
        RuntimeError: They are replaced already.
    """
    if _entered:
        raise RuntimeError(
            "a virtual device is active already; expected one at a time: leave its use_backend "
            "or activate() first"
        )
    library = torch.library.Library("aten", "IMPL")
    _entered.append(library)
    try:
        library.impl("scaled_dot_product_attention", _fused_attention, "AutogradMeta")
        library.impl("dropout", _dropout, "AutogradMeta")
        library.impl("rms_norm", _rms_norm, "AutogradMeta")
        yield
    finally:
        _entered.clear()
        library._destroy()


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    qkv = query, key, value
    kernel = _kernel_for(*qkv, enable_gqa=enable_gqa) if attn_mask is None else "math"
    if kernel == "flash":
        outputs = aten._scaled_dot_product_flash_attention(
            *qkv, dropout_p, is_causal, False, scale=scale
        )
    elif kernel == "efficient":
        needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in qkv)
        outputs = aten._scaled_dot_product_efficient_attention(
            *qkv, None, needs_grad, dropout_p, is_causal, scale=scale
        )
    else:
        outputs = aten._scaled_dot_product_attention_math(
            *qkv, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return outputs[0]  # type: ignore[no-any-return]


def _kernel_for(query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool) -> str:
    """Return the name of the kernel that CUDA chooses for these sizes and dtypes."""
    if not query.dim() == key.dim() == value.dim() == 4:
        return "math"
    width, value_width = query.shape[-1], value.shape[-1]
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    has_heads = query.shape[1] == key.shape[1] == value.shape[1]
    is_even = width == key.shape[-1] == value_width <= MAX_HEAD_WIDTH
    if is_half and is_even and (has_heads or enable_gqa):
        return "flash"
    rows_bytes = width * query.element_size(), value_width * query.element_size()
    is_aligned = not any(nbytes % ALIGNMENT_BYTES for nbytes in rows_bytes)
    is_for_efficient = has_heads and is_aligned and width == key.shape[-1] and not enable_gqa
    return "efficient" if is_for_efficient and (is_half or query.dtype is torch.float32) else "math"


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0.0:
        return input
    return aten.native_dropout(input, p, train)[0]  # type: ignore[no-any-return]


def _rms_norm(
    x: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Run as a layer norm: one pass each way; the input is saved unchanged, with statistics."""
    outputs = aten.native_layer_norm(x, normalized_shape, weight, None, eps or 1e-6)
    return outputs[0]  # type: ignore[no-any-return]
