"""The way of a slice's parameters to the device, and of their gradients back, as autograd nodes.

    host parameter -> Wait -> ToDevice -> what the layers compute with

Backward, ToDevice queues the copies of the gradients to the host and returns them before they hold
data; Wait blocks until they do. They are two nodes since autograd runs a node on the thread of the
device its gradients are on: the wait is on the thread of the host, beside the device's own. Every
use on the device meets in one ToDevice, so gradients are summed there and copied once.

    tensors = on_device(slice_.parameters, pending.tensors, GradientPath(copies, "slice 0"))
    inputs = gated(inputs, path)

NOTE [ Order of gradients of gradients ]
    Where a backward builds a graph, a gradient that reaches the host is used on another thread than
    one that stays on the device. So a backward through them would reach a slice's layers by both
    ways at once, and whichever came first would be summed first. In the plain model what comes from
    the parameters' gradients is there when the gradient of the slice's input is asked for. So here
    that one waits: it passes a gate, of which an empty tensor goes with the others to the host and
    comes back with them. And what brings them back runs on the thread of the device, which takes
    what is ready in autograd's order, and nothing until all of it is. The gate is a hook, for a
    node of its own would sum what reaches it before the rest.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves, tree_map

from pp_offload._transfer.plain_copies import PendingCopy, PlainCopies
from pp_offload.errors import OffloadError

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
        self._under_way: deque[PendingCopy] = deque()
        self._passed: Callable[[], Passed | None] = lambda: None

    def note_passed(self, token: Tensor) -> None:
        """The gradient of an input went through a gate in the backward that runs now."""
        passed = self._passed()
        if passed is None:
            passed = Passed()
            Variable._execution_engine.queue_callback(passed)
            self._passed = weakref.ref(passed)
        passed.tokens.append(token)

    def take_passed(self) -> list[Tensor]:
        """The tokens of those that did so in this backward."""
        passed = self._passed()
        if passed is None:
            return []
        tokens, passed.tokens = passed.tokens, []
        return tokens

    def send(self, gradients: Sequence[Tensor | None]) -> Gradients:
        """The gradients on the host; they hold no data before :meth:`settle`."""
        present = [gradient for gradient in gradients if gradient is not None]
        for gradient in present:
            self._check_dense(gradient)
        if not present:
            return tuple(gradients)
        pending = self._copies.copy_to_host(present, self._label)
        self._under_way.append(pending)
        if torch.is_anomaly_check_nan_enabled():
            self.settle()  # autograd reads them as they come out of this node
        # The tensors themselves may still be written, by a thread, when these belong to a graph.
        sent = iter([tensor.detach() for tensor in pending.tensors])
        return tuple(None if gradient is None else next(sent) for gradient in gradients)

    def settle(self) -> None:
        """Block the host until all that was sent is there."""
        while self._under_way:
            self._copies.synchronize(self._under_way.popleft())

    def bring(self, tensors: Sequence[Tensor | None]) -> Gradients:
        """The same on the device, with their data."""
        present = [tensor.detach() for tensor in tensors if tensor is not None]
        if not present:
            return tuple(tensors)
        brought = iter(self._copies.synchronize(self._copies.copy_to_device(present, self._label)))
        return tuple(None if tensor is None else next(brought) for tensor in tensors)

    def _check_dense(self, gradient: Tensor) -> None:
        if gradient.layout is not torch.strided:
            raise OffloadError(
                f"a gradient of {self._label}, of shape {tuple(gradient.shape)}, has the layout "
                f"{gradient.layout}; expected a dense one; make the layer with sparse=False"
            )


class Passed:
    """Tokens of gates. They know their graph, which has the path, so the path must not have them.

    The backward has them until it ends, however it does.
    """

    def __init__(self) -> None:
        self.tokens: list[Tensor] = []

    def __call__(self) -> None:
        """It has ended."""


class Gate(torch.autograd.Function):
    """Gives a gradient and a token; its backward runs when both have come back."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return gradient.detach(), gradient.new_empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, token: Tensor | None) -> Any:
        return gradient


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
        if not torch.is_grad_enabled():
            return None, None, *ctx.path.send(gradients)
        tokens = ctx.path.take_passed()
        sent = ToHost.apply(ctx.path, len(tokens), *tokens, *gradients)
        return None, None, *sent[1:]


class ToHost(torch.autograd.Function):
    """Forward, device to host, to be waited for; backward, :class:`ToDevice`.

    See NOTE [ Order of gradients of gradients ]: tokens are taken along, and what is on the device
    of the results is there to make autograd run the backward on the device's thread.
    """

    @staticmethod
    def forward(ctx: Any, path: GradientPath, num: int, *tensors: Tensor | None) -> Any:
        ctx.path = path
        ctx.tokens = [token.detach() for token in tensors[:num] if token is not None]
        ctx.set_materialize_grads(False)
        present = (tensor for tensor in tensors if tensor is not None)
        anchor = next(present).new_empty(0)
        return anchor, *path.send(tensors[num:])

    @staticmethod
    def backward(ctx: Any, anchor: Tensor | None, *gradients: Tensor | None) -> Any:
        return None, None, *ctx.tokens, *ToDevice.apply(ctx.path, None, *gradients)


@dataclass(frozen=True, slots=True)
class Turn:
    """When autograd runs a slice's ToDevice, among the nodes that are ready: the newest first."""

    node: Any
    """The ToDevice."""

    usual: int
    """Its number: as soon as the slice's layers are done, so that gradients leave the device."""

    graph: int
    """Behind what made the slice's inputs, whose gradients have passed their gates then."""

    def register(self, outputs: Sequence[Any]) -> None:
        """It is told when a backward comes to the slice."""
        for value in tree_leaves(outputs):
            if isinstance(value, Tensor) and value.grad_fn not in (None, self.node):
                value.register_hook(self)

    def __call__(self, gradient: Tensor) -> None:
        """The hook of a slice's output, whose gradient comes before anything of the slice."""
        self.node._set_sequence_nr(self.graph if torch.is_grad_enabled() else self.usual)


def gated(
    inputs: Sequence[tuple[Any, ...]], tensors: Sequence[Tensor], path: GradientPath
) -> tuple[list[tuple[Any, ...]], Turn | None]:
    """What a slice is called with, and the hook of what it returns.

    See NOTE [ Order of gradients of gradients ]. A backward that builds no graph is as without.

    Args:
        inputs: Of each microbatch.
        tensors: What :func:`on_device` returned.
        path: Of their gradients.
    """
    tracked = next((tensor for tensor in tensors if tensor.requires_grad), None)
    if tracked is None:
        return list(inputs), None
    numbers = [_number(tracked)]
    there = weakref.ref(path)  # the hook is on what may be the program's, and outlives the graph

    def passes(gradient: Tensor) -> Tensor | None:
        path = there()
        if path is None or not torch.is_grad_enabled():
            return None
        gradient, token = Gate.apply(gradient)
        path.note_passed(token)
        return gradient

    def behind_gate(value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.requires_grad):
            return value
        if value.is_leaf:  # it is the program's, on which no hook may stay
            value = value.view_as(value)
        else:
            numbers.append(max(0, _number(value) - 1))
        value.register_hook(passes)
        return value

    behind = [tree_map(behind_gate, one) for one in inputs]
    return behind, Turn(tracked.grad_fn, numbers[0], min(numbers))


def _number(tensor: Tensor) -> int:
    """Of the node that made it: the higher, the sooner autograd runs it among those ready."""
    assert tensor.grad_fn is not None, "it is a leaf"
    return tensor.grad_fn._sequence_nr()


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
