"""Layers of any model that load their own parameters to the device: each layer is a slice.

Each layer gets a ``forward`` of ours around its own, and the modules around the layers get hooks
that note when a forward begins and ends:

    model.forward             a forward begins
      layer 0                 load 0 to the device, prefetch 1
        tensors stand in the places of the parameters; its own forward computes
      layer 1                 free layer 0; layer 1 is loaded; prefetch 2
    end                       nothing is prefetched any more

The next layers are those that ran next in the last forward: a model may skip layers, call one
twice, or have several stacks. A wrong guess costs an unused copy.

NOTE [ Interrupted forwards ]
    An interrupt skips the hook at the end of a forward. So the module that began a forward may
    begin another, and an interrupted layer ends the forward by itself. A forward inside another
    may follow an outer one that was interrupted outside of its layers, with weights written since.
    So it reuses nothing that is on the device.

NOTE [ Computed again ]
    A checkpoint around a layer calls our ``forward`` again in backward. A layer may also checkpoint
    its own forward, with a function that is its attribute :data:`CHECKPOINT`, as those of Hugging
    Face do. Backward then calls only the inside. So meanwhile the attribute is a function that
    passes on a callable which loads the layer if needed. In that case the checkpoint saves all
    tensors itself, in forward and again in backward, because it counts them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from pp_offload._common.torch_private import never_compiled, tree_leaves
from pp_offload._hooks import is_in_backward, is_recomputing
from pp_offload._slices.cache import CacheFigures, SliceCache
from pp_offload._slices.saved_parameters import OnDevice, SlicedRun
from pp_offload._slices.slices import Exchange, Places
from pp_offload._slices.waiting import place
from pp_offload.errors import OffloadError


class LayerOrder:
    """Layers by number; layers not in the last forward come in the ``usual`` order."""

    def __init__(self, usual: Sequence[int]) -> None:
        self.usual = self._last = list(usual)
        self._seen: list[int] = []
        self._place = self._place_back = 0

    def begin(self) -> None:
        self._seen, self._place = [], 0

    def end(self) -> None:
        if self._seen != self._last[: len(self._seen)]:  # else it may have ended early
            self._last = self._seen

    def arrive(self, layer: int, num: int) -> list[int]:
        """Note that the forward reached a layer; return the ``num`` layers expected next."""
        self._seen.append(layer)
        if layer in self._last[self._place :]:
            self._place = place = self._last.index(layer, self._place) + 1
            return self._last[place : place + num]
        place = self.usual.index(layer) + 1 if layer in self.usual else len(self.usual)
        return self.usual[place : place + num]

    def return_to(self, layer: int, num: int) -> list[int]:
        """Note that a backward reached a layer; return the ``num`` layers expected next."""
        places = [place for place, number in enumerate(self._last) if number == layer]
        if not places:
            return []
        # A place above that of the layer before means another backward.
        self._place_back = max((p for p in places if p < self._place_back), default=places[-1])
        return self._last[max(0, self._place_back - num) : self._place_back][::-1]


CHECKPOINT = "_gradient_checkpointing_func"  # source: transformers ``GradientCheckpointingLayer``


class OffloadedLayers(CacheFigures, AbstractContextManager["OffloadedLayers"]):
    """Layers whose parameters wait on the host, until :meth:`close`.

    Made by :func:`pp_offload.offload_layers`.

    Attributes:
        names: Names of the layers, in order.
    """

    def __init__(self, names: Sequence[str], usual: Sequence[int], cache: SliceCache) -> None:
        self.names = list(names)
        self._cache, self._order = cache, LayerOrder(usual)
        self._layers: dict[int, StreamedForward] = {}
        self._hooks: list[RemovableHandle] = []
        self._run: SlicedRun | None = None
        self._opener: Module | None = None
        self._is_reentrant = False  # a layer of the current forward is in a reentrant checkpoint

    def __repr__(self) -> str:
        parameters = [p for layer in self._layers.values() for p in layer.places.parameters()]
        return f"<OffloadedLayers: {len(self._layers)} layers, {self._figures(parameters)}>"

    def __deepcopy__(self, memo: object) -> OffloadedLayers:
        """Return the handle of a copy of the model; each layer of the copy joins when it runs."""
        return OffloadedLayers(self.names, self._order.usual, self._cache)

    def close(self) -> None:
        """Give the layers their own forward back. May be called twice. Parameters stay on the host:
        ``model.to(device)`` moves them for good. Live graphs can still run backward.
        """
        while self._hooks:
            self._hooks.pop().remove()
        for layer in self._layers.values():
            layer.close()
        self._layers.clear()
        self._cache.clear()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _begin(self, module: Module, args: object) -> None:
        if is_in_backward():
            return
        self._cache.clear()  # weights may have been written; see NOTE [ Interrupted forwards ]
        if self._run is None or self._opener is module:
            self._order.begin()
            self._opener, self._run = module, SlicedRun(self._cache)
            self._is_reentrant = False

    def _end(self, module: Module, args: object, output: object) -> None:
        if self._opener is not module:
            return
        if self._is_reentrant:
            # Saved parameters keep a run with the graph, so that its last layer is still loaded in
            # backward; the forward of a reentrant checkpoint saves nothing.
            nodes = [tensor.grad_fn for tensor in _tensors(output) if tensor.grad_fn is not None]
            if nodes:
                metadata: Any = nodes[0].metadata
                metadata["pp_offload: layers on the device"] = self._run
        self._opener = self._run = None
        self._order.end()
        self._cache.end_prefetch()

    def _compute(self, layer: StreamedForward, call: Callable[[], Any], saves: bool) -> Any:
        """Return the result of ``call``, with a layer on the device; prefetch the next layers."""
        self._layers[layer.number] = layer
        run, num = self._run, self._cache.num_ahead
        try:
            if is_in_backward():
                run, following = SlicedRun(self._cache), self._order.return_to(layer.number, num)
            elif run is None:  # the layer is called alone
                self._cache.clear()
                run, following = SlicedRun(self._cache), []
            else:
                following = self._order.arrive(layer.number, num)
            layers = [self._layers[number] for number in following if number in self._layers]
            with OnDevice(run, layer.places, (each.places for each in layers)) as arrived:
                return arrived.compute(call, list(layer.exchanges(arrived)), saves=saves)
        except BaseException:
            if not is_in_backward():  # in backward, a checkpoint stops early by raising
                self._opener = self._run = None
                self._cache.clear()
            raise


class StreamedForward:
    """Forward of a layer around the layer's own, which alone runs after :meth:`close`."""

    def __init__(self, handle: OffloadedLayers, number: int, layer: Module, places: Places) -> None:
        self.handle, self.number, self.places = handle, number, places
        self._layer = layer
        self._own: Callable[..., Any] | None = vars(layer).get("forward")
        self._is_closed = False
        self._thread: threading.Thread | None = None  # the thread that computes with the layer
        self._arrived: OnDevice | None = None

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Layer's own forward, for :func:`inspect.signature`."""
        return self._own or type(self._layer).forward.__get__(self._layer)

    @never_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() and any(t.requires_grad for t in _tensors((args, kwargs))):
            self.handle._is_reentrant = True
        return self._with_parameters(self.__wrapped__, True, *args, **kwargs)

    def _with_parameters(
        self, function: Callable[..., Any], saves: bool, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Return the result of ``function``, with the layer's parameters on the device, which are
        saved as references if ``saves``: see NOTE [ Computed again ].
        """
        call = partial(function, *args, **kwargs)
        if self._is_closed or not self.places.parameters():
            return call()
        if self._arrived is not None and self._thread is threading.current_thread():
            # A checkpoint around the layer matches saved tensors by position, so if a backward in
            # the forward runs the layer again, references are saved again.
            return self._arrived.compute(call, saves=saves and is_recomputing())
        return self.handle._cache.locked(self.handle._compute, self, call, saves)

    def exchanges(self, arrived: OnDevice) -> Iterator[Exchange]:
        """Yield attributes to exchange while the layer computes, beside its parameters."""
        yield vars(self), {"_thread": threading.current_thread(), "_arrived": arrived}
        attributes = vars(self._layer)
        if attributes.get(CHECKPOINT) is not None:
            yield attributes, {CHECKPOINT: partial(self._checkpoint, attributes[CHECKPOINT])}

    def _checkpoint(
        self, checkpoint: Callable[..., Any], inside: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call the layer's own checkpoint; ``inside`` computes with the layer's parameters."""
        return checkpoint(partial(self._with_parameters, inside, False), *args, **kwargs)

    def apply_elsewhere(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Stand in for ``Module._apply``, so that ``to`` does not move what waits on the host.
        Raise an OffloadError if ``fn`` changes the dtype, or the memory format.
        """
        parameters = self.places.parameters()
        ids = {id(tensor) for p in parameters for tensor in (p, p.grad)}

        def apply(tensor: Tensor) -> Tensor:
            if id(tensor) not in ids:
                return fn(tensor)
            like = torch.empty_like(tensor[(slice(2),) * tensor.dim()])
            new = fn(like)
            if new.dtype == like.dtype and new.stride() == like.stride():
                return tensor
            into = "another memory format" if new.dtype == like.dtype else new.dtype
            raise OffloadError(
                f"a parameter that waits on the host has {like.dtype}, and the model is turned "
                f"into {into}; expected the same; turn the modules before it back, and convert the "
                "model before offload_layers()"
            )

        return type(self._layer)._apply(self._layer, apply, recurse)

    def close(self) -> None:
        """Remove this from the layer, unless another function was put around it."""
        self._is_closed = True
        attributes = vars(self._layer)
        attributes.pop("_apply", None)
        if attributes.get("forward") is self:
            del attributes["forward"]
            attributes.update({} if self._own is None else {"forward": self._own})


def install(
    model: Module,
    layers: Mapping[str, Module],
    waiting: Collection[int],
    around: Iterable[Module],
    cache: SliceCache,
) -> OffloadedLayers:
    """Move waiting parameters to the host and all else to the device; give each layer its forward.
    Layers run in the forwards of the modules ``around``; ``waiting`` has the ids of parameters.
    Those of another handle's layers stay on the host.
    """
    for earlier in [each for layer in layers.values() for each in offloaded_in(layer)]:
        earlier.handle.close()
        earlier.close()  # the handle of a copied model has only the layers that ran
    others = [p for other in offloaded_in(model) for p in other.places.parameters()]
    places = [Places(name, layer, lambda p: id(p) in waiting) for name, layer in layers.items()]
    place(model, [each.parameters() for each in places], cache.copies, others)
    usual = [number for number, each in enumerate(places) if each.parameters()]
    handle = OffloadedLayers(list(layers), usual, cache)
    for number, (layer, each) in enumerate(zip(layers.values(), places, strict=True)):
        streamed = StreamedForward(handle, number, layer, each)
        handle._layers[number] = streamed
        vars(layer).update(forward=streamed, _apply=streamed.apply_elsewhere)
    for module in around:
        handle._hooks += [
            module.register_forward_pre_hook(handle._begin),
            module.register_forward_hook(handle._end, always_call=True),
        ]
    return handle


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def offloaded_in(module: Module) -> list[StreamedForward]:
    """Return the forwards of layers in a module whose parameters wait on the host."""
    applies = [vars(part).get("_apply") for part in module.modules()]
    owners = [getattr(method, "__self__", None) for method in applies]
    return [owner for owner in owners if isinstance(owner, StreamedForward)]
