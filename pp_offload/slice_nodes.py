"""The way of a slice's parameters to the device, and of their gradients back, as autograd nodes.

    host parameter -> Wait -> ToDevice -> what the layers compute with

Backward, ToDevice queues the copies of the gradients to the host and returns them before they hold
data; Wait blocks until they do. They are two nodes since autograd runs a node on the thread of the
device its gradients are on: the wait is on the thread of the host, beside the device's own. Every
use on the device meets in one ToDevice, so gradients are summed there and copied once.

    tensors = on_device(slice_.parameters, arrival.tensors, GradientPath(copies, "slice 0"))
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pp_offload.errors import OffloadError
from pp_offload.plain_copies import Arrival, PlainCopies

Gradients = tuple[Tensor | None, ...]


class GradientPath:
    """Copies of a slice's gradients to the host, until somebody waits for them.

    Args:
        copies: Makes them.
        label: For messages.
    """

    def __init__(self, copies: PlainCopies, label: str) -> None:
        self._copies = copies
        self._label = label
        self._under_way: deque[Arrival] = deque()

    def send(self, gradients: Sequence[Tensor | None]) -> Gradients:
        """The gradients on the host; they hold no data before :meth:`settle`."""
        present = [gradient for gradient in gradients if gradient is not None]
        for gradient in present:
            self._check_dense(gradient)
        if not present:
            return tuple(gradients)
        arrival = self._copies.send(present, self._label)
        self._under_way.append(arrival)
        # The tensors themselves may still be written, by a thread, when these belong to a graph.
        sent = iter([tensor.detach() for tensor in arrival.tensors])
        return tuple(None if gradient is None else next(sent) for gradient in gradients)

    def settle(self) -> None:
        """Block the host until all that was sent is there."""
        while self._under_way:
            self._copies.settle(self._under_way.popleft())

    def bring(self, tensors: Sequence[Tensor | None]) -> Gradients:
        """The same on the device, with their data."""
        present = [tensor.detach() for tensor in tensors if tensor is not None]
        if not present:
            return tuple(tensors)
        brought = iter(self._copies.settle(self._copies.bring(present, self._label)))
        return tuple(None if tensor is None else next(brought) for tensor in tensors)

    def _check_dense(self, gradient: Tensor) -> None:
        if gradient.layout is not torch.strided:
            raise OffloadError(
                f"a gradient of {self._label}, of shape {tuple(gradient.shape)}, has the layout "
                f"{gradient.layout}; expected a dense one; make the layer with sparse=False"
            )


class Wait(torch.autograd.Function):
    """Nothing forward; backward, gradients are passed on when they hold their data."""

    @staticmethod
    def forward(ctx: Any, path: GradientPath, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.path = path
        ctx.set_materialize_grads(False)
        return parameters

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.path.settle()
        return None, *gradients


class ToDevice(torch.autograd.Function):
    """Forward, host to device; backward, :class:`ToHost`."""

    @staticmethod
    def forward(
        ctx: Any, path: GradientPath, loaded: Sequence[Tensor] | None, *tensors: Tensor | None
    ) -> Gradients:
        ctx.path = path
        ctx.set_materialize_grads(False)
        if loaded is None:
            return path.bring(tensors)
        return tuple(tensor.detach() for tensor in loaded)  # theirs shall know of no graph

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return None, None, *ToHost.apply(ctx.path, *gradients)


class ToHost(torch.autograd.Function):
    """Forward, device to host, to be waited for; backward, :class:`ToDevice`."""

    @staticmethod
    def forward(ctx: Any, path: GradientPath, *tensors: Tensor | None) -> Gradients:
        ctx.path = path
        ctx.set_materialize_grads(False)
        return path.send(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return None, *ToDevice.apply(ctx.path, None, *gradients)


def on_device(
    parameters: Sequence[Tensor], loaded: Sequence[Tensor], path: GradientPath
) -> list[Tensor]:
    """What layers compute with in place of their parameters.

    Args:
        parameters: On the host.
        loaded: Their copies on the device.
        path: Takes the gradients back.

    Returns:
        Tensors on the memory of ``loaded``; gradients of those whose parameters want some reach
        the parameters.
    """
    wanting = [i for i, one in enumerate(parameters) if one.requires_grad]
    tensors = [tensor.detach() for tensor in loaded]
    if not (wanting and torch.is_grad_enabled()):
        return tensors
    hosts = Wait.apply(path, *(parameters[i] for i in wanting))
    tracked = ToDevice.apply(path, [loaded[i] for i in wanting], *hosts)
    for i, tensor in zip(wanting, tracked, strict=True):
        tensors[i] = tensor
    return tensors
