"""Layers of a model that wait on the host: how they are made so, and how they are made whole again.

offloaded = install(model, layers, waits, [model], cache)  # then see streamed_forward.py
...
offloaded.close()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils.hooks import RemovableHandle

from pp_offload._slices.cache import CacheFigures, SliceCache
from pp_offload._slices.places import Places
from pp_offload._slices.streamed_forward import LayerStream, StreamedForward
from pp_offload._slices.to_host import move, move_buffers, move_to_host
from pp_offload.errors import OffloadError


class OffloadedLayers(CacheFigures):
    """Layers whose parameters wait on the host, until :meth:`close`.

    Made by :func:`pp_offload.offload_layers`.

    Attributes:
        names: Of the layers, in order.
    """

    def __init__(
        self, stream: LayerStream, layers: Mapping[str, Module], hooks: list[RemovableHandle]
    ) -> None:
        self.names = list(layers)
        self._cache = stream.cache
        self._stream = stream
        self._layers = list(layers.values())
        self._hooks = hooks

    def close(self) -> None:
        """Give the layers their own forward back. Twice is fine.

        Parameters stay on the host: ``model.to(device)`` takes them to the device for good. Graphs
        that are alive can still be gone back through.
        """
        while self._hooks:
            self._hooks.pop().remove()
        for streamed in list(self._stream.layers.values()):
            streamed.is_closed = True  # somebody may have put a function around it
        for layer in self._layers:
            _restore(layer)
        self._layers.clear()
        self._cache.drop()

    def __enter__(self) -> OffloadedLayers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class StaysOnHost:
    """What ``Module.to`` and its like call of a layer: what waits on the host does not move."""

    def __init__(self, layer: Module, places: Places) -> None:
        self._layer = layer
        self._places = places

    def __call__(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Apply ``fn`` to all that does not stay; an OffloadError if it is no mere move."""
        parameters = self._places.parameters()
        staying = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
        ids = set(map(id, staying))

        def apply(tensor: Tensor) -> Tensor:
            if id(tensor) not in ids:
                return fn(tensor)
            dtype = fn(tensor.new_empty(())).dtype
            if dtype == tensor.dtype:
                return tensor
            raise OffloadError(
                f"a parameter that waits on the host has {tensor.dtype}, and the model is turned "
                f"into {dtype}; expected the dtype that it had; what comes before it in the model "
                "may have been converted already, so either take that back with "
                f"model.to({tensor.dtype}), or close() and convert the model again; at best it is "
                "converted before offload_layers()"
            )

        kind: Any = type(self._layer)
        return kind._apply(self._layer, apply, recurse)


def install(
    model: Module,
    layers: Mapping[str, Module],
    waits: Callable[[Parameter], bool],
    around: Iterable[Module],
    cache: SliceCache,
) -> OffloadedLayers:
    """Move what waits to the host and all else to the device; give each layer its forward.

    The layers run in the forwards of the modules around them; ``waits`` is asked for parameters.
    """
    device = cache.copies.backend.device
    places = {name: Places(name, layer, waits) for name, layer in layers.items()}
    placed = move_to_host([one.parameters() for one in places.values()], cache.copies)
    for parameter in model.parameters():
        if id(parameter) not in placed and parameter.device != device:
            move(parameter, parameter.detach().to(device))
    move_buffers(model, device)
    usual = [number for number, one in enumerate(places.values()) if one.parameters()]
    stream = LayerStream(cache, usual)
    for number, (name, layer) in enumerate(layers.items()):
        vars(layer)["_apply"] = StaysOnHost(layer, places[name])
        vars(layer)["forward"] = StreamedForward(stream, number, layer, places[name])
    return OffloadedLayers(stream, layers, [hook for one in around for hook in stream.hook(one)])


def is_offloaded(layer: Module) -> bool:
    """Whether something in a layer waits on the host."""
    return any(isinstance(vars(one).get("_apply"), StaysOnHost) for one in layer.modules())


def _restore(layer: Module) -> None:
    """Take a layer's forward away, unless somebody has put another around it meanwhile."""
    attributes = vars(layer)
    if isinstance(attributes.get("_apply"), StaysOnHost):
        del attributes["_apply"]
    ours = attributes.get("forward")
    if isinstance(ours, StreamedForward):
        del attributes["forward"]
        attributes.update({} if ours.own is None else {"forward": ours.own})
