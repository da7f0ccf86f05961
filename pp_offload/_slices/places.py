"""Where in a layer the parameters are that wait on the host, and what stands there meanwhile.

A place is a module and a name in it, not a parameter: what stands there may be exchanged between
steps, as ``load_state_dict(assign=True)`` does, and the module may get another parent, as adapters
do it. While the layer computes, tensors on the device stand in the places. They are no parameters,
so the parameter's own data, device and version are never touched.

    places = Places(layer, lambda parameter: not parameter.requires_grad)
    slice_ = places.slice("layers.0")
    y = places.compute(slice_, tensors, call)  # one for each of slice_.parameters
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from pp_offload._slices.cache import Slice
from pp_offload._slices.recurrent import rnns_in
from pp_offload._slices.stand_ins import StandIn, StandIns
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

    def taken_by(self, tensor: Tensor) -> StandIn:
        """What has a tensor stand there."""
        return StandIn(self.module._parameters, self.name, tensor)


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
        self._stand_ins = StandIns()

    def parameters(self) -> list[Parameter]:
        """Those that stand there now, each once."""
        self.settle()
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

    def compute(
        self,
        slice_: Slice,
        tensors: Sequence[Tensor],
        call: Callable[[], Any],
        *,
        others: Sequence[StandIn] = (),
        pack: Callable[[Tensor], Any] | None = None,
    ) -> Any:
        """What ``call`` returns while ``tensors[i]`` stands wherever parameter ``i`` does.

        Args:
            slice_: Has the parameters that stand there now.
            tensors: One for each of them.
            call: Computes.
            others: What is to stand elsewhere meanwhile.
            pack: The hook that saves tensors meanwhile, if any.
        """
        index = {id(parameter): i for i, parameter in enumerate(slice_.parameters)}
        new = [
            place.taken_by(tensors[index[id(parameter)]])
            for place in self._places
            if (parameter := place.parameter) is not None
        ]
        return self._stand_ins.compute(call, [*new, *others], self._rnns, pack)

    def saving(self, call: Callable[[], Any], pack: Callable[[Tensor], Any]) -> Any:
        """What ``call`` returns while tensors are saved through ``pack``; nothing else differs."""
        return self._stand_ins.compute(call, (), pack=pack)

    def settle(self) -> None:
        """Put back what interrupts have left. See NOTE [ An interrupt at any line ]."""
        self._stand_ins.settle()
