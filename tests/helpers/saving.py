"""Operators that save what a test wants saved, and tell what came back.

came_back: list[Saved] = []
y = Keeps.apply(x, lambda h: [h, h.t()], came_back)     # came_back is filled in backward
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from helpers.sessions import as_bytes, drawn

Make = Callable[[Tensor], Sequence[Tensor]]


Saved = tuple[object, ...]
"""A saved tensor as backward got it: everything that a kernel could see of it, its size first."""


def as_seen(tensor: Tensor) -> Saved:
    data = as_bytes(tensor)
    place = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
    flags = tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return *place, *flags, getattr(data, "_local_tensor", data).tolist()


class Keeps(torch.autograd.Function):
    """Doubles; saves what ``make`` makes of its input, which backward notes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, make: Make, came_back: list[Saved]) -> Tensor:
        ctx.save_for_backward(*make(x))
        ctx.came_back = came_back
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.came_back.extend(as_seen(t) for t in ctx.saved_tensors)
        return gradient * 2, None, None


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


class ReadsTwice(torch.autograd.Function):
    """x * cos(x); its backward asks for its saved tensors twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.cos()
        ctx.save_for_backward(x, y)
        return y * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, _ = ctx.saved_tensors
        _, y = ctx.saved_tensors
        return gradient * (y - x * x.sin())


class GivesSaved(torch.autograd.Function):
    """x + 1; its backward returns a view of what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x + 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x.view_as(x)


class Raises(torch.autograd.Function):
    """Identity whose backward raises the error it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: type[BaseException]) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        raise ctx.error


def dtensor(*shape: int, seed: int = 0) -> Any:
    """A sharded tensor of random numbers, of this process alone; see :func:`one_rank`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(drawn(*shape, seed=seed), init_device_mesh("cpu", (1,)), [Shard(0)])


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
