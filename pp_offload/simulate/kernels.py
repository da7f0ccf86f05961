"""Kernels of an accelerator for tensors without data.

On ``meta`` PyTorch computes attention from matrix products, which saves the scores, saves the mask
of a dropout as numbers, and an RMS norm's input in float32. Accelerators do none of that. So inside
``accelerator_kernels()`` attention takes the flash kernel there or the memory-efficient one, where
they can compute it, dropout the fused one, and an RMS norm what a layer norm takes.

NOTE [ Below functions ]
    A mode for functions is not active while autograd recomputes a checkpoint. So the operators
    themselves are replaced, for ``meta`` alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

aten = torch.ops.aten

MAX_HEAD_WIDTH = 256
"""Widest heads of the flash kernel."""

ALIGNMENT_BYTES = 16
"""Heads of the memory-efficient kernel take a multiple of this many bytes."""


_entered: list[torch.library.Library] = []


@contextmanager
def accelerator_kernels() -> Iterator[None]:
    """Inside the context, run an accelerator's kernels on ``meta``, on every thread.

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
        library.impl("scaled_dot_product_attention", _attention, "AutogradMeta")
        library.impl("dropout", _dropout, "AutogradMeta")
        library.impl("rms_norm", _rms_norm, "AutogradMeta")
        yield
    finally:
        _entered.clear()
        library._destroy()


def _attention(
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
    is_aligned = all(
        size * query.element_size() % ALIGNMENT_BYTES == 0 for size in (width, value_width)
    )
    is_for_efficient = has_heads and is_aligned and width == key.shape[-1] and not enable_gqa
    return "efficient" if is_for_efficient and (is_half or query.dtype is torch.float32) else "math"


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0.0:
        return input
    return aten.native_dropout(input, p, train)[0]  # type: ignore[no-any-return]


def _rms_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Run as a layer norm: one pass each way; the input is saved unchanged, with statistics."""
    outputs = aten.native_layer_norm(input, normalized_shape, weight, None, eps or 1e-6)
    return outputs[0]  # type: ignore[no-any-return]
