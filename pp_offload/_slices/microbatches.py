"""Splits inputs of a forward along the batch, and joins the outputs.

Tensors are found wherever they stand in tuples, lists and dicts. The parts are those of
``torch.chunk``, so the last may be smaller, and there may be fewer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pp_offload._common.torch_private import tree_flatten, tree_unflatten


def split(inputs: tuple[Any, ...], num_microbatches: int) -> list[tuple[Any, ...]]:
    """Return the arguments of each microbatch; a value without a batch dimension goes to each."""
    if num_microbatches == 1:
        return [inputs]
    leaves, spec = tree_flatten(inputs)
    if hiding := sorted({type(leaf).__name__ for leaf in leaves if _hides_tensors(leaf)}):
        raise ValueError(
            f"inputs of type {', '.join(hiding)} have tensors inside that would not be cut into "
            "microbatches; expected tensors in tuples, lists and dicts, or num_microbatches=1"
        )
    sizes = sorted({len(leaf) for leaf in leaves if _has_batch(leaf)})
    if len(sizes) != 1:
        raise ValueError(
            f"the inputs have first dimensions {sizes}; expected tensors of one batch size, to cut "
            f"them into {num_microbatches} microbatches"
        )
    size = max(1, -(-sizes[0] // num_microbatches))
    num = max(1, -(-sizes[0] // size))  # an empty batch is one part, unchanged
    parts = [leaf.split(size) if _has_batch(leaf) else [leaf] * num for leaf in leaves]
    cut = [tree_unflatten(list(part), spec) for part in zip(*parts, strict=True)]
    return [tuple(arguments) for arguments in cut]


def join(outputs: Sequence[Any]) -> Any:
    """Join the outputs of all microbatches, tensors along the first dimension."""
    if len(outputs) == 1:
        return outputs[0]
    flat = [tree_flatten(output) for output in outputs]
    structures = [structure for _, structure in flat]
    if any(structure != structures[0] for structure in structures):
        raise ValueError(
            "the outputs of the microbatches differ in structure; take num_microbatches=1"
        )
    joined = [_joined(leaves) for leaves in zip(*(leaves for leaves, _ in flat), strict=True)]
    return tree_unflatten(joined, structures[0])


def _has_batch(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() >= 1


def _hides_tensors(leaf: Any) -> bool:
    inside = leaf.values() if isinstance(leaf, Mapping) else getattr(leaf, "__dict__", {}).values()
    return not isinstance(leaf, Tensor) and any(isinstance(value, Tensor) for value in inside)


def _joined(leaves: Sequence[Any]) -> Any:
    if all(map(_has_batch, leaves)):
        return torch.cat(list(leaves))
    first = leaves[0]
    is_tensor = isinstance(first, Tensor)
    if not is_tensor and all(leaf == first for leaf in leaves):
        return first
    what = f"a tensor of {first.dim()} dimensions" if is_tensor else f"{first!r}"
    raise ValueError(
        f"an output of {len(leaves)} microbatches is {what}; expected tensors with a batch "
        "dimension, or the same plain value of each"
    )
