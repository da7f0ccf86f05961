"""Inputs of a forward in parts along the batch, and outputs in one piece again.

Tensors are found wherever they stand in tuples, lists and dicts. The parts are those of
``torch.chunk``: of the same size, but for the last, which has the rest; and there are fewer of them
where the batch is too small for so many.

    parts = split(inputs, 4)
    output = join([model(*part) for part in parts])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pp_offload._common.torch_private import tree_flatten, tree_unflatten


def split(inputs: tuple[Any, ...], num_microbatches: int) -> list[tuple[Any, ...]]:
    """The arguments of each microbatch.

    Args:
        inputs: Tensors of one dimension or more are cut along the first; all else goes to each.
        num_microbatches: At least one. The most there will be.

    Raises:
        ValueError: Tensors differ in the batch, or there is none; or an input hides tensors.
    """
    if num_microbatches == 1:
        return [inputs]
    leaves, spec = tree_flatten(inputs)
    if hiding := sorted({type(leaf).__name__ for leaf in leaves if _hides_tensors(leaf)}):
        raise ValueError(
            f"inputs of type {', '.join(hiding)} have tensors inside that would not be cut into "
            "microbatches; expected tensors in tuples, lists and dicts; pass those, register the "
            "type with torch.utils._pytree, or take num_microbatches=1"
        )
    sizes = sorted({len(leaf) for leaf in leaves if _has_batch(leaf)})
    if len(sizes) != 1:
        raise ValueError(
            f"the inputs have first dimensions {sizes}; expected tensors of one batch size, to cut "
            f"them into {num_microbatches} microbatches; pass what is not batched as a plain value "
            "or a tensor without dimensions, or take num_microbatches=1"
        )
    size = max(1, -(-sizes[0] // num_microbatches))
    num = max(1, -(-sizes[0] // size))  # a batch of none is one part, as it is
    parts = [leaf.split(size) if _has_batch(leaf) else [leaf] * num for leaf in leaves]
    cut = [tree_unflatten(list(part), spec) for part in zip(*parts, strict=True)]
    return [tuple(one) for one in cut]


def join(outputs: Sequence[Any]) -> Any:
    """The outputs of all microbatches as one.

    Args:
        outputs: Of each, the same structure; tensors are put together along the first dimension.

    Raises:
        ValueError: Tensors cannot be put together, or other values differ.
    """
    if len(outputs) == 1:
        return outputs[0]
    flat = [tree_flatten(output) for output in outputs]
    _, spec = flat[0]
    if any(other != spec for _, other in flat):
        raise ValueError(
            "the outputs of the microbatches differ in structure: "
            f"{sorted({str(other) for _, other in flat})}; expected one; take num_microbatches=1"
        )
    joined = [_joined(leaves) for leaves in zip(*(leaves for leaves, _ in flat), strict=True)]
    return tree_unflatten(joined, spec)


def _has_batch(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() >= 1


def _hides_tensors(leaf: Any) -> bool:
    inside = leaf.values() if isinstance(leaf, Mapping) else getattr(leaf, "__dict__", {}).values()
    return not isinstance(leaf, Tensor) and any(isinstance(one, Tensor) for one in inside)


def _joined(leaves: Sequence[Any]) -> Any:
    if all(map(_has_batch, leaves)):
        return torch.cat(list(leaves))
    first = leaves[0]
    if not any(isinstance(leaf, Tensor) for leaf in leaves) and all(one == first for one in leaves):
        return first
    raise ValueError(
        f"an output of {len(leaves)} microbatches is {_said(first)}; expected tensors with a batch "
        "dimension, or the same plain value of each; reduce over the batch outside of the model, "
        "or take num_microbatches=1"
    )


def _said(leaf: Any) -> str:
    is_tensor = isinstance(leaf, Tensor)
    return f"a tensor of {leaf.dim()} dimensions" if is_tensor else f"{leaf!r}"
