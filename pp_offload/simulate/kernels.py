"""Has tensors without data take the kernels that an accelerator would take.

On ``meta`` PyTorch computes attention from matrix products, which saves the scores, and saves the
mask of a dropout as numbers. Accelerators save neither. So while this is entered, attention without
a mask takes the flash kernel there, and dropout the fused one; in recomputations, too.

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


@contextmanager
def accelerator_kernels() -> Iterator[None]:
    """Inside, ``meta`` has the kernels of an accelerator."""
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("scaled_dot_product_attention", _attention, "AutogradMeta")
        library.impl("dropout", _dropout, "AutogradMeta")
        yield
    finally:
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
    if attn_mask is not None:  # the flash kernel takes none; this one saves what it has to
        found = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    else:
        found = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )
    return found[0]  # type: ignore[no-any-return]


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0.0:
        return input
    return aten.native_dropout(input, p, train)[0]  # type: ignore[no-any-return]
