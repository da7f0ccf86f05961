"""The way of a slice's parameters to the device, and of their gradients back, as autograd nodes.

    host parameter -> Wait -> Leave -> Meet -> what the layers compute with

All uses of a parameter on the device meet in its Meet, so its gradient is summed there. In
backward, Leave queues the copy of the gradient to the host and returns it before it holds data;
Wait blocks until it does. These are two nodes since autograd runs a node on the thread of the
device that its gradient is on: so the wait blocks the host's thread and not the device's.

    tensors = on_device(slice_.parameters, pending.tensors, GradientPath(copies, "slice 0"))
    inputs, turn = gated(inputs, tensors, path)

NOTE [ Nodes of its own ]
    Each parameter has three nodes of its own. Autograd runs all that it can reach: a node that
    several parameters share leads it to all of them, and it calls the hooks of those that a forward
    did not use, with no gradient; or it frees the graph of a whole slice where the gradient of one
    parameter was asked for.
    Still gradients of a slice leave in one copy. Of the nodes that are ready autograd takes the one
    that was made last: the slice's own, then each Meet, which notes the gradient, then the first
    Leave, which sends all that were noted, then the others, which find theirs sent, then each Wait,
    the first of which blocks. If a gradient is noted later, it is sent later.

NOTE [ Order of gradients of gradients ]
    Where a backward builds a graph, parameters' gradients go to the host, and inputs' gradients
    stay on the device; autograd uses them on two threads. So a second backward, through these
    gradients, would reach a slice's layers by both ways at once, and whichever came first would be
    summed first. In the plain model, what comes through the parameters' gradients is there when the
    gradient of the slice's input is asked for. So here the input's gradient waits: it passes a
    gate, whose token, an empty tensor, goes to the host with the parameters' gradients and comes
    back with them. The node that brings them back runs on the device's thread, when all of them are
    ready and in autograd's order. A hook applies the gate: as a node of the forward's graph it
    would sum what reaches it before the rest.

NOTE [ Without grad ]
    A parameter requires grad also where grad is disabled, and PyTorch looks at that: an RNN on the
    CPU, or a product of matrices, then takes another way, with other bits. A layer may enable grad
    in an evaluation, too. So tensors on the device are joined to their parameters in any mode, and
    gradients reach these. The tensors are no leaves that require grad: of such ones autocast would
    keep all casts until it ends, and a gradient would be lost in them.
    Transforms of torch.func and traces do not take such nodes. So there they are leaves; these
    refuse gradients, which a backward in a trace has.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from pp_offload._common.torch_private import (
    graph_task_id,
    is_transformed,
    queue_callback,
    records_operators,
    tree_leaves,
    tree_map,
)
from pp_offload._slices.plain_copies import PendingCopy, PlainCopies
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
        self._noted: weakref.WeakValueDictionary[int, Noted] = weakref.WeakValueDictionary()

    def noted(self) -> Noted:
        """What was noted in the backward that runs on this thread."""
        task = graph_task_id()
        noted = self._noted.get(task)
        if noted is None:
            self._noted[task] = noted = Noted()
            queue_callback(noted)
        return noted

    def leave(self, number: int) -> Tensor | None:
        """Take a gradient that was noted; all that are noted are sent, if they were not yet."""
        noted = self.noted()
        if noted.met:
            met, noted.met = noted.met, {}
            noted.sent.update(zip(met, self.to_host([*met.values()]), strict=True))
        return noted.sent.pop(number)

    def to_host(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """:meth:`send`, as a node where the running backward builds a graph."""
        if not torch.is_grad_enabled():
            return self.send(gradients)
        noted = self.noted()
        tokens, noted.tokens = noted.tokens, []
        sent: Gradients = ToHost.apply(self, len(tokens), *tokens, *gradients)
        return sent[1:]

    def send(self, gradients: Sequence[Tensor | None]) -> Gradients:
        """Queue copies of gradients to the host; they hold no data before :meth:`settle`."""
        present = [gradient for gradient in gradients if gradient is not None]
        for gradient in present:
            self._check_dense(gradient)
        if not present:
            return tuple(gradients)
        pending = self._copies.copy_to_host(present, self._label)
        self._under_way.append(pending)
        # Then autograd reads them as they come out of this node. (The second is True by default.)
        if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            self.settle()
        # Aliases, for a thread may still write the tensors when these belong to a graph.
        sent = iter([tensor.detach() for tensor in pending.tensors])
        return tuple(None if gradient is None else next(sent) for gradient in gradients)

    def settle(self) -> None:
        """Block the host until all that was sent is there."""
        while self._under_way:
            self._copies.synchronize(self._under_way.popleft())

    def bring(self, tensors: Sequence[Tensor | None]) -> Gradients:
        """Bring tensors to the device; the host waits until they hold their data."""
        present = [tensor.detach() for tensor in tensors if tensor is not None]
        if not present:
            return tuple(tensors)
        brought = iter(self._copies.synchronize(self._copies.copy_to_device(present, self._label)))
        return tuple(None if tensor is None else next(brought) for tensor in tensors)

    def refuse(self, leaf: Tensor) -> None:
        """Raise, for a gradient came to what is not joined to its parameter."""
        raise OffloadError(
            f"a trace without grad runs a backward that came to a parameter of {self._label}, "
            "which waits on the host; expected none there; run the forward outside of the trace, "
            "or ask for the gradient with torch.autograd.grad"
        )

    def _check_dense(self, gradient: Tensor) -> None:
        if gradient.layout is not torch.strided:
            raise OffloadError(
                f"a gradient of {self._label}, of shape {tuple(gradient.shape)}, has the layout "
                f"{gradient.layout}; expected a dense one; make the layer with sparse=False"
            )


class Noted:
    """What a running backward has of a slice; it holds this until it ends, however it does.

    The path refers to it weakly, for tensors in it refer to their graph, and that to the path.

    Attributes:
        tokens: Of inputs' gradients that passed a gate.
        met: Gradients on the device, by the number of their parameter.
        sent: Those on the host that nobody took yet.
    """

    def __init__(self) -> None:
        self.tokens: list[Tensor] = []
        self.met: dict[int, Tensor] = {}
        self.sent: dict[int, Tensor | None] = {}

    def __call__(self) -> None:
        """The backward has ended, and lets this go."""


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
    """Forward, the identity; backward, passes the gradient on when it holds its data."""

    @staticmethod
    def forward(ctx: Any, path: GradientPath, parameter: Tensor) -> Tensor:
        ctx.path = path
        ctx.set_materialize_grads(False)
        return parameter

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        ctx.path.settle()
        return None, gradient


class Leave(torch.autograd.Function):
    """Forward, host to device; backward, device to host, to be waited for."""

    @staticmethod
    def forward(ctx: Any, path: GradientPath, number: int, loaded: Tensor, host: Tensor) -> Tensor:
        ctx.path, ctx.number = path, number
        ctx.set_materialize_grads(False)
        return loaded.detach()  # the cache's own shall join no graph

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        return None, None, None, None if gradient is None else ctx.path.leave(ctx.number)


class Meet(torch.autograd.Function):
    """Forward, the identity; backward, notes the gradient for the next Leave."""

    @staticmethod
    def forward(ctx: Any, path: GradientPath, number: int, tensor: Tensor) -> Tensor:
        ctx.path, ctx.number = path, number
        ctx.set_materialize_grads(False)
        return tensor.detach()  # and not the input, of which autograd would make a view

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is not None:
            ctx.path.noted().met[ctx.number] = gradient
        return None, None, gradient


class ToDevice(torch.autograd.Function):
    """Forward, host to device; backward, :class:`ToHost`."""

    @staticmethod
    def forward(ctx: Any, path: GradientPath, *tensors: Tensor | None) -> Gradients:
        ctx.path = path
        ctx.set_materialize_grads(False)
        return path.bring(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return None, *ctx.path.to_host(gradients)


class ToHost(torch.autograd.Function):
    """Forward, device to host, to be waited for; backward, :class:`ToDevice`.

    See NOTE [ Order of gradients of gradients ]: it takes tokens along, and its first result, an
    empty tensor on the device, makes autograd run the backward on the device's thread.
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
        return None, None, *ctx.tokens, *ToDevice.apply(ctx.path, *gradients)


class Turn:
    """Says when autograd runs a slice's Leave nodes: of the nodes that are ready, it takes the one
    with the highest sequence number.

    With their own numbers they run as soon as the slice's layers are done, so that gradients leave.

    Args:
        tensors: What :func:`on_device` returned for parameters that require grad.
        inputs: Numbers of what made the slice's inputs. If a graph is built, they run behind that,
            for the inputs' gradients have passed their gates then.
    """

    def __init__(self, tensors: Sequence[Tensor], inputs: Sequence[int]) -> None:
        self._meeting = [_node(tensor) for tensor in tensors]
        leaving = [node.next_functions[0][0] for node in self._meeting]
        self._usual = [(node, node._sequence_nr()) for node in leaving]
        self._graph = max(0, min([self._usual[0][1], *(number - 1 for number in inputs)]))
        self._builds_graph = False

    def register(self, outputs: Sequence[Any]) -> None:
        """Have hooks call it when a backward comes to the slice."""
        for value in tree_leaves(outputs):
            if isinstance(value, Tensor) and value.grad_fn not in (None, *self._meeting):
                value.register_hook(self)

    def __call__(self, gradient: Tensor) -> None:
        """The hook of a slice's output, whose gradient comes before anything of the slice."""
        if torch.is_grad_enabled() != self._builds_graph:
            self._builds_graph = not self._builds_graph
            for node, usual in self._usual:
                with suppress(RuntimeError):  # torch 2.11 frees nodes of unused tensors
                    node._set_sequence_nr(self._graph if self._builds_graph else usual)


def gated(
    inputs: Sequence[tuple[Any, ...]], tensors: Sequence[Tensor], path: GradientPath
) -> tuple[list[tuple[Any, ...]], Turn | None]:
    """The inputs that a slice is called with, and the hook of what it returns.

    See NOTE [ Order of gradients of gradients ]. A backward that builds no graph does not change.

    Args:
        inputs: Of each microbatch.
        tensors: What :func:`on_device` returned.
        path: Of their gradients.
    """
    tracked = [tensor for tensor in tensors if tensor.requires_grad]
    if not tracked or not torch.is_grad_enabled():
        return list(inputs), None
    numbers: list[int] = []
    there = weakref.ref(path)  # the hook may be on a tensor of the program, and outlive the graph

    def passes(gradient: Tensor) -> Tensor | None:
        path = there()
        if path is None or not torch.is_grad_enabled():
            return None
        gradient, token = Gate.apply(gradient)
        path.noted().tokens.append(token)
        return gradient

    def behind_gate(value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.requires_grad):
            return value
        if value.is_leaf:  # it is the program's, on which no hook may stay
            value = value.view_as(value)
        else:
            numbers.append(_node(value)._sequence_nr())
        value.register_hook(passes)
        return value

    behind = [tree_map(behind_gate, one) for one in inputs]
    return behind, Turn(tracked, numbers)


def _node(tensor: Tensor) -> Any:
    """What made it."""
    assert tensor.grad_fn is not None, "it is a leaf"
    return tensor.grad_fn


def on_device(
    parameters: Sequence[Tensor], loaded: Sequence[Tensor], path: GradientPath
) -> list[Tensor]:
    """What layers compute with in place of their parameters.

    Args:
        parameters: On the host.
        loaded: Their copies on the device.
        path: Takes the gradients back.

    Returns:
        Tensors on the memory of ``loaded``. Their gradients reach the parameters that require
        grad; they have the parameters' attributes.
    """
    tensors = _joined(parameters, loaded, path)
    share_attributes(parameters, tensors)
    return tensors


def share_attributes(parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Have ``tensors[i]`` and parameter ``i`` have the same attributes of the program's own.

    As ``main_grad``. What a layer sets in its forward would else be lost.
    """
    for parameter, tensor in zip(parameters, tensors, strict=True):
        tensor.__dict__ = parameter.__dict__


def _joined(
    parameters: Sequence[Tensor], loaded: Sequence[Tensor], path: GradientPath
) -> list[Tensor]:
    wanting = [i for i, one in enumerate(parameters) if one.requires_grad]
    tensors = [tensor.detach() for tensor in loaded]
    if not wanting:
        return tensors
    if not torch.is_grad_enabled() and (is_transformed() or records_operators()):
        for i in wanting:
            tensors[i] = _lone(tensors[i], path)
        return tensors
    with torch.inference_mode(False):  # this enables grad, too; see NOTE [ Without grad ]
        # All of a kind in turn, since their order says when they run: see NOTE [ Nodes of its own ]
        waiting = [Wait.apply(path, parameters[i]) for i in wanting]
        leaving = [
            Leave.apply(path, i, loaded[i], host) for i, host in zip(wanting, waiting, strict=True)
        ]
        for i, tensor in zip(wanting, leaving, strict=True):
            tensors[i] = Meet.apply(path, i, tensor)
    return tensors


def _lone(tensor: Tensor, path: GradientPath) -> Parameter:
    """A leaf that requires grad and refuses gradients. See NOTE [ Without grad ]."""
    leaf = Parameter(tensor)  # ``requires_grad_`` raises in a transform
    leaf.register_post_accumulate_grad_hook(path.refuse)
    return leaf
