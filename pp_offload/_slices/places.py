"""Where in a layer the parameters are that wait on the host, and what stands there meanwhile.

A place is a module and a name in it, not a parameter: what stands there may be exchanged between
steps, as ``load_state_dict(assign=True)`` does, and the module may get another parent, as adapters
do it. While the layer computes, tensors on the device stand in the places. They are no parameters,
so the parameter's own data, device and version are never touched.

    places = Places(layer, lambda parameter: not parameter.requires_grad)
    slice_ = places.slice("layers.0")
    with places.exchanged(slice_, tensors):  # one for each of slice_.parameters
        ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from pp_offload._slices.cache import Slice
from pp_offload._slices.recurrent import lists_of, rnns_in
from pp_offload.errors import OffloadError

HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter is."""

    module: Module
    """That has it."""

    name: str
    """In the module."""

    @property
    def parameter(self) -> Parameter | None:
        """What stands there now."""
        return self.module._parameters.get(self.name)


class Places:
    """The places of one layer, as they were when this was made.

    Args:
        layer: Is looked through.
        wants: Whether a parameter waits on the host.
    """

    def __init__(self, layer: Module, wants: Callable[[Parameter], bool]) -> None:
        self._places = tuple(
            Place(module, name)
            for module in layer.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and wants(parameter)
        )
        self._rnns = rnns_in(layer)

    def parameters(self) -> list[Parameter]:
        """Those that stand there now, each once."""
        return list({id(p): p for one in self._places if (p := one.parameter) is not None}.values())

    def slice(self, label: str) -> Slice:
        """What the layer computes with now.

        Raises:
            OffloadError: A parameter is not on the host, or has another name by now.
        """
        self._check_names(label)
        parameters = self.parameters()
        for one in parameters:
            if one.device != HOST:
                raise OffloadError(
                    f"a parameter of {label}, of shape {tuple(one.shape)}, is on {one.device}, "
                    f"expected {HOST}, where it waits between uses; load a state that is on the "
                    "host, or close() the handle of offload_layers() before parameters are replaced"
                )
        return Slice(label, tuple(parameters))

    def _check_names(self, label: str) -> None:
        """A norm, a parametrization or pruning gives a parameter another name, or makes others of
        it: these would be used where they wait.
        """
        for place in self._places:
            names = place.module._parameters
            if place.name not in names:
                raise OffloadError(
                    f"a {type(place.module).__name__} in {label} had a parameter {place.name!r} "
                    f"that waits on the host, and now has {list(names)}; expected the names of "
                    "when offload_layers() was called; close() its handle before parameters are "
                    "pruned, normed or parametrized, and call offload_layers() again after that"
                )

    @contextmanager
    def exchanged(self, slice_: Slice, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Have ``tensors[i]`` stand wherever parameter ``i`` of the slice does, for a while."""
        index = {id(parameter): i for i, parameter in enumerate(slice_.parameters)}
        before: list[tuple[Place, Parameter]] = []
        try:
            for place in self._places:
                parameter = place.parameter
                if parameter is not None:
                    before.append((place, parameter))
                    place.module._parameters[place.name] = tensors[index[id(parameter)]]  # type: ignore[assignment]
            with lists_of(self._rnns):
                yield
        finally:
            for place, parameter in before:
                place.module._parameters[place.name] = parameter
