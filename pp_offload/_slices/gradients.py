"""Autograd nodes that bring parameters to the device and their gradients back to the host.

    host parameter -> Settle -> Bring -> what the layers compute with

All uses of a parameter on the device meet in its Bring, so its gradient is summed there. In
backward, Bring queues the copy of the gradient to the host and returns the copy before it holds
data; Settle blocks until it does. Autograd runs a node on the thread of its gradient's device:
with two nodes, the wait blocks the host's thread and not the device's.

Each parameter has nodes of its own: a node that several share would lead autograd to all of them,
and it would call the hooks of those that a forward did not use.

NOTE [ Without grad ]
    A parameter requires grad also where grad is disabled, and PyTorch checks that: a matrix product
    then takes another kernel, with other bits. A layer may enable grad in an evaluation, too. So
    tensors on the device are joined to their parameters in any mode. They are not leaves: autocast
    keeps all casts of leaves until it ends, and a gradient would be lost in them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pp_offload._common.torch_private import set_versions
from pp_offload._slices.plain_copies import PendingCopy, PlainCopies
from pp_offload.errors import OffloadError


class Gradients:
    """Copies of a slice's gradients to the host, until :meth:`settle` waits for them."""

    def __init__(self, copies: PlainCopies, label: str) -> None:
        self._copies = copies
        self._label = label
        self._under_way: deque[PendingCopy] = deque()

    def send(self, gradient: Tensor) -> Tensor:
        """Queue the copy of a gradient to the host; it holds no data before :meth:`settle`."""
        if torch.is_grad_enabled():
            raise OffloadError(
                f"a backward with create_graph=True came to parameters of {self._label}, which "
                "wait on the host; expected no gradients of their gradients; ask for gradients of "
                "inputs alone with torch.autograd.grad(loss, inputs, create_graph=True), or keep "
                "these parameters on the device"
            )
        if gradient.layout is not torch.strided:
            raise OffloadError(
                f"a gradient of {self._label}, of shape {tuple(gradient.shape)}, has the layout "
                f"{gradient.layout}; expected a dense one; make the layer with sparse=False"
            )
        pending = self._copies.copy_to_host([gradient], self._label)
        self._under_way.append(pending)
        # Autograd then looks for NaN as soon as it has a gradient. (The second is True by default.)
        if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            self.settle()
        return pending.tensors[0].detach()  # an alias with no other user: it becomes .grad

    def settle(self) -> None:
        """Block the host until all queued copies have run."""
        while self._under_way:
            self._copies.synchronize(self._under_way.popleft())


class Settle(torch.autograd.Function):
    """Identity in forward; in backward, passes the gradient on when it holds its data."""

    @staticmethod
    def forward(ctx: Any, gradients: Gradients, parameter: Tensor) -> Tensor:
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        return parameter.detach()  # without its grad_dtype: a cast must come behind this backward

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        ctx.gradients.settle()
        return None, gradient


class Bring(torch.autograd.Function):
    """Copy to the device in forward; in backward, queue a copy to the host for Settle."""

    @staticmethod
    def forward(ctx: Any, gradients: Gradients, loaded: Tensor, host: Tensor) -> Tensor:
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        return loaded.detach()  # the cache's own tensor must not join a graph

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        return None, None, None if gradient is None else ctx.gradients.send(gradient)


def on_device(
    parameters: Sequence[Tensor], loaded: Sequence[Tensor], gradients: Gradients
) -> list[Tensor]:
    """Return tensors on the memory of ``loaded``, with which layers compute instead of parameters.

    Their gradients reach the parameters that require grad, and a parameter's attributes, such as
    ``weight.main_grad``, are on the tensor, too, and its version, which a layer may compare.
    """
    set_versions(tuple(loaded), tuple([parameter._version for parameter in parameters]))
    tensors = [tensor.detach() for tensor in loaded]
    wanting = [i for i, parameter in enumerate(parameters) if parameter.requires_grad]
    with torch.inference_mode(False):  # this enables grad, too; see NOTE [ Without grad ]
        # One kind after the other: autograd runs the newest ready node, so all gradients of a
        # slice are sent before the first is waited for.
        settling = [Settle.apply(gradients, parameters[i]) for i in wanting]
        for i, host in zip(wanting, settling, strict=True):
            tensors[i] = Bring.apply(gradients, loaded[i], host)
    for parameter, tensor in zip(parameters, tensors, strict=True):
        tensor.__dict__ = parameter.__dict__  # shared: a layer may set attributes in its forward
    return tensors
