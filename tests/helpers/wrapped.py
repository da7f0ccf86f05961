"""Tensor subclasses of the two kinds there are in training: quantised, and several in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten


class Scaled(Tensor):
    """Eight bits an element and one scale; computes with what that stands for.

    An alias has the very tensors that it has.
    """

    data8: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, data8: Tensor, scale: Tensor) -> Scaled:
        return Tensor._make_wrapper_subclass(
            cls, data8.shape, strides=data8.stride(), dtype=scale.dtype, device=data8.device
        )

    def __init__(self, data8: Tensor, scale: Tensor) -> None:
        self.data8, self.scale = data8, scale

    @classmethod
    def of(cls, x: Tensor) -> Scaled:
        """``x``, rounded."""
        scale = x.abs().amax().reshape(1, 1) / 127
        return cls((x / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data8", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: None, size: Any, stride: Any) -> Scaled:
        assert (inner["data8"].shape, inner["data8"].stride()) == (size, stride)
        return Scaled(inner["data8"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.detach.default:
            return cls(args[0].data8, args[0].scale)
        args, kwargs = tree_map_only(cls, lambda t: t.data8 * t.scale, (args, kwargs or {}))
        return func(*args, **kwargs)


def leaves(tensor: Tensor) -> list[Tensor]:
    """The plain tensors inside."""
    if isinstance(tensor, TwoTensor):
        return leaves(tensor.a) + leaves(tensor.b)
    if isinstance(tensor, Scaled):
        return [tensor.data8, tensor.scale]
    return [tensor]


class KeepsSaved(torch.autograd.Function):
    """x times two; backward shows the tensor that was saved along."""

    seen: list[Tensor] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor) -> Tensor:
        ctx.save_for_backward(saved)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        KeepsSaved.seen.append(ctx.saved_tensors[0])
        return gradient * 2, None


WRAPPERS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "quantised": lambda x: Scaled.of(x[0]),
    "pair": lambda x: TwoTensor(x[0], x[1]),
    "transposed": lambda x: TwoTensor(x[0].t(), x[1].t()),
    "nested": lambda x: TwoTensor(TwoTensor(x[0], x[1]), TwoTensor(x[2], x[3])),
    "mixed": lambda x: TwoTensor(Scaled.of(x[0]), Scaled.of(x[1])),
}
