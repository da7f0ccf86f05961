"""References to parameters, which a forward through slices saves in place of the tensors.

While a slice runs, a saved tensor that lies on the memory of one of its parameters becomes a
reference: which parameter, which view of it, at which version. So nothing keeps a slice on the
device between forward and backward, and backward loads each slice once, in reverse order and ahead
of its use. Other saved tensors go to the hooks that were entered before, if any.

    run = SlicedRun(cache)
    with OnDevice(run, places, following) as slice_:  # places of the slices to prefetch
        y = slice_.compute(partial(layer, x))

Parameters reach the device, and their gradients the host, through two autograd nodes each:

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
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pp_offload._common.torch_private import neg_view, never_compiled, set_versions, top_hooks
from pp_offload._core.geometry import Geometry, flat_bytes
from pp_offload._core.saved import Resident, modified
from pp_offload._hooks import Chaining, is_in_backward, unpack
from pp_offload._memory.addresses import has_storage
from pp_offload._slices.cache import SliceCache
from pp_offload._slices.plain_copies import PendingCopy, PlainCopies
from pp_offload._slices.slices import Exchange, Places, Slice, stamp
from pp_offload.errors import OffloadError


@dataclass(eq=False)
class SlicedRun:
    """A forward through slices, and its backwards."""

    cache: SliceCache
    slices: list[Slice] = field(default_factory=list)
    needed: set[int] = field(default_factory=set)  # indices of slices for which backward will ask


class OnDevice(AbstractContextManager["OnDevice"]):
    """The slice that a forward reached, with its parameters on the device inside the context."""

    def __init__(
        self, run: SlicedRun, places: Places, following: Iterable[Places], is_needed: bool = False
    ) -> None:
        """Load the slice, and prefetch those that follow and have parameters. With ``is_needed``,
        note that backward will need the slice.
        """
        self._run, self._index, self._slice = run, len(run.slices), places.slice()
        run.slices.append(self._slice)
        if is_needed and self._slice.parameters:
            run.needed.add(self._index)
        loaded = run.cache.use(self._slice, run)
        run.cache.prefetch(each.slice() for each in following if each.parameters())
        self._gradients = Gradients(run.cache.copies, self._slice.label)
        self._stamps = [stamp(parameter) for parameter in self._slice.parameters]
        self._tensors: list[Tensor] | None = self._joined(loaded)

    def compute(
        self, call: Callable[[], Any], more: Sequence[Exchange] = (), *, saves: bool = True
    ) -> Any:
        """Return the output of ``call``, which computes with the slice and with ``more`` exchanges.
        Parameters are saved as references if ``saves``; otherwise the hooks stay unchanged. A
        checkpoint may call this again in backward, when the slice is loaded again.
        """
        if self._tensors is None:
            return self._run.cache.locked(self._compute_again, call)
        pack = self._pack(self._tensors) if saves and torch.is_grad_enabled() else None
        return self._slice.compute(self._tensors, call, more, pack)

    def _compute_again(self, call: Callable[[], Any]) -> Any:
        return self._slice.compute(self._joined(self.reload()), call)

    def __exit__(self, *error: object) -> None:
        self._tensors = None

    def reload(self, only: int | None = None) -> list[Tensor]:
        """Return the parameters for backward, and prefetch the slices before. Raise an OffloadError
        if a parameter, or the ``only`` parameter used, was changed in place or exchanged since the
        forward.
        """
        run, slice_ = self._run, self._slice
        for i in range(len(slice_.parameters)) if only is None else (only,):
            parameter, then = slice_.parameters[i], self._stamps[i]
            if parameter._version != then[0]:
                raise modified(parameter, then[0], slice_.label)
            if stamp(parameter) != then:
                raise OffloadError(
                    f"a parameter of {slice_.label}, of shape {tuple(parameter.shape)}, was given "
                    "other memory through .data between a forward and its backward; expected that "
                    "before or after both"
                )
        tensors = run.cache.use(slice_, run, only)
        if is_in_backward():
            before = reversed(range(self._index))
            run.cache.prefetch(run.slices[i] for i in before if i in run.needed)
        return tensors

    def _joined(self, loaded: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors on the memory of ``loaded``, for layers to compute with. Gradients reach
        the parameters that require grad, and a parameter's attributes, such as
        ``weight.main_grad``, are on the tensor, too, and its version, which a layer may compare.
        """
        parameters, gradients = self._slice.parameters, self._gradients
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
            tensor.__dict__ = parameter.__dict__  # shared: layers may set attributes in a forward
        return tensors

    def _pack(self, tensors: Sequence[Tensor]) -> Chaining:
        places = {
            tensor.untyped_storage()._cdata: i for i, tensor in enumerate(tensors) if tensor.numel()
        }
        outer = top_hooks(False)

        @never_compiled
        def pack(tensor: Tensor) -> Any:
            if has_storage(tensor):
                place = places.get(tensor.untyped_storage()._cdata)
                if place is not None:
                    self._run.needed.add(self._index)
                    is_conj, is_neg = tensor.is_conj(), tensor.is_neg()
                    return ParameterReference(self, place, Geometry.of(tensor), is_conj, is_neg)
            if outer is None:
                return Resident(tensor)
            packed = outer[0](tensor)
            # Recipes look for our own objects in the nodes, so nothing is put around them.
            return packed if outer[1] is unpack else Chained(packed, outer[1])

        chaining = Chaining(pack)
        chaining.outer = None if outer is None else outer[0]
        return chaining


class ParameterReference(NamedTuple):
    """Reference to a saved tensor that is a parameter of a slice, or a view of one."""

    slice: OnDevice
    place: int
    geometry: Geometry
    is_conj: bool
    is_neg: bool

    @never_compiled
    def unpack(self) -> Tensor:
        tensor = self.slice.reload(self.place)[self.place]
        if tensor.dtype != self.geometry.dtype:
            tensor = flat_bytes(tensor)
        view = self.geometry.on_storage_of(tensor)
        view = neg_view(view) if self.is_neg else view
        return view.conj() if self.is_conj else view


class Chained(NamedTuple):
    """A tensor that hooks of other code around the model packed, and their unpack hook."""

    packed: Any
    hook: Callable[[Any], Tensor]

    @never_compiled
    def unpack(self) -> Tensor:
        return self.hook(self.packed)


@dataclass(eq=False)
class Gradients:
    """Copies of a slice's gradients to the host, until :meth:`settle` waits for them."""

    copies: PlainCopies
    label: str
    under_way: deque[PendingCopy] = field(default_factory=deque)

    def send(self, gradient: Tensor) -> Tensor:
        """Queue the copy of a gradient to the host; it holds no data before :meth:`settle`."""
        if torch.is_grad_enabled():
            raise OffloadError(
                f"a backward with create_graph=True came to parameters of {self.label}, which "
                "wait on the host; expected no gradients of their gradients; ask for gradients of "
                "inputs alone with torch.autograd.grad(loss, inputs, create_graph=True), or keep "
                "these parameters on the device"
            )
        if gradient.layout is not torch.strided:
            raise OffloadError(
                f"a gradient of {self.label}, of shape {tuple(gradient.shape)}, has the layout "
                f"{gradient.layout}; expected a dense one; make the layer with sparse=False"
            )
        pending = self.copies.copy_to_host([gradient], self.label)
        self.under_way.append(pending)
        # Autograd then looks for NaN as soon as it has a gradient. (The second is True by default.)
        if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            self.settle()
        return pending.tensors[0].detach()  # an alias with no other user: it becomes .grad

    def settle(self) -> None:
        """Block the host until all queued copies have run."""
        while self.under_way:
            self.copies.synchronize(self.under_way.popleft())


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
