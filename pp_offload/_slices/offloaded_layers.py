"""Layers of a model that wait on the host: how they are made so, and how they are made whole again.

    offloaded = install(model, places, [model], cache)
    ...
    offloaded.close()

See :mod:`~pp_offload._slices.streamed_forward` for what happens in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils.hooks import RemovableHandle

from pp_offload._core.statistics import OffloadStatistics
from pp_offload._slices.cache import SliceCache
from pp_offload._slices.layer_order import LayerOrder
from pp_offload._slices.layer_stream import Around, LayerStream
from pp_offload._slices.places import HOST, Places
from pp_offload._slices.plain_copies import PlainCopies
from pp_offload._slices.stays import StaysOnHost
from pp_offload._slices.streamed_forward import StreamedForward
from pp_offload._slices.to_host import move_to_host


class OffloadedLayers:
    """Layers whose parameters wait on the host, until :meth:`close`.

    Made by :func:`pp_offload.offload_layers`.

    Args:
        stream: Brings them.
        layers: By name.
        hooks: Of what is around the layers.

    Attributes:
        names: Of the layers, in order.
    """

    def __init__(
        self, stream: LayerStream, layers: dict[str, Module], hooks: list[RemovableHandle]
    ) -> None:
        self.names = list(layers)
        self._stream = stream
        self._layers = list(layers.values())
        self._hooks = hooks

    def statistics(self) -> OffloadStatistics:
        """What was moved: parameters count as reloaded, gradients as offloaded."""
        return self._stream.cache.copies.statistics()

    @property
    def parameter_bytes_on_device(self) -> int:
        """Bytes of the layers' parameters that the device has now."""
        return self._stream.cache.nbytes

    @property
    def peak_parameter_bytes_on_device(self) -> int:
        """The most bytes of the layers' parameters that the device had at a time."""
        return self._stream.cache.peak_bytes

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
        self._stream.cache.drop()

    def __enter__(self) -> OffloadedLayers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def install(
    model: Module,
    places: dict[str, tuple[Module, Places]],
    around: Iterable[Module],
    cache: SliceCache,
) -> OffloadedLayers:
    """Move what waits to the host and all else to the device; give each layer its forward.

    Args:
        model: That has the layers.
        places: Of each layer by name, and the layer.
        around: Modules whose forward the layers run in.
        cache: Brings them.
    """
    _move(model, [place for _, place in places.values()], cache.copies)
    usual = [number for number, (_, one) in enumerate(places.values()) if one.parameters()]
    stream = LayerStream(cache, LayerOrder(usual))
    for number, (name, (layer, place)) in enumerate(places.items()):
        vars(layer)["_apply"] = StaysOnHost(layer, place)
        vars(layer)["forward"] = StreamedForward(stream, number, name, layer, place)
    hooks = [hook for one in around for hook in Around(stream).hook(one)]
    return OffloadedLayers(stream, {name: layer for name, (layer, _) in places.items()}, hooks)


def waits(layer: Module) -> bool:
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


def _move(model: Module, places: Iterable[Places], copies: PlainCopies) -> None:
    """What waits to the host, each layer into one allocation; all else to the device."""
    backend = copies.backend
    placed: set[int] = set()
    for one in places:
        new = [p for p in one.parameters() if id(p) not in placed]
        placed.update(map(id, new))
        for parameter, on_host in zip(new, _on_host(new, copies), strict=True):
            move_to_host(parameter, on_host)
    for parameter in model.parameters():
        if id(parameter) not in placed and parameter.device != backend.device:
            move_to_host(parameter, parameter.detach().to(backend.device))
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                there = moved.setdefault(id(buffer), buffer.to(backend.device))
                module._buffers[name] = there


def _on_host(parameters: Sequence[Parameter], copies: PlainCopies) -> Sequence[Tensor]:
    """Copies in memory from which a device can copy beside compute."""
    if copies.backend.is_host or not parameters:
        return [one.detach().to(HOST) for one in parameters]
    host = copies.host_tensors(parameters)
    for copy, parameter in zip(host, parameters, strict=True):
        copy.copy_(parameter.detach())
    return host
