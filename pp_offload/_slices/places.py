"""Places of waiting parameters in layers, and the device tensors that stand there meanwhile.

A place is a module and a name in it, not a parameter: the object there may be exchanged between
steps, as by ``load_state_dict(assign=True)``, and adapters give the module another parent.
While the layers compute, tensors on the device stand in the places. They are no parameters, so
the parameter's own data, device and version are never touched.

    places = Places("layers.0", layer, lambda parameter: not parameter.requires_grad)
    slice_ = places.slice()
    y = slice_.compute(tensors, call)  # a tensor for each of slice_.parameters

NOTE [ Interrupts ]
    A signal handler may raise where Python calls or loops, but never inside a call in C. So a
    single such call restores all places: an interrupt leaves no tensor where a parameter
    was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from pp_offload._hooks.hook_scopes import saving
from pp_offload.errors import OffloadError

HOST = torch.device("cpu")

Exchange = tuple[dict[str, Any], dict[str, Any]]
"""A dict of attributes or parameters, and the values to hold in it while layers compute."""


@dataclass(frozen=True, eq=False, slots=True)
class Slice:
    """The parameters of some layers in a forward."""

    label: str
    parameters: tuple[Parameter, ...]
    """On the host, each once."""

    places: tuple[tuple[dict[str, Any], str, int], ...]
    """For each place, a module's parameters, a name in them, and an index of a tensor."""

    @property
    def nbytes(self) -> int:
        return sum([parameter.nbytes for parameter in self.parameters])

    def has_same(self, other: Slice) -> bool:
        """Whether the parameters are the same objects."""
        return list(map(id, self.parameters)) == list(map(id, other.parameters))

    def compute(
        self,
        tensors: Sequence[Tensor],
        call: Callable[[], Any],
        more: Sequence[Exchange] = (),
        pack: Callable[[Tensor], Any] | None = None,
    ) -> Any:
        """Return the result of ``call`` while ``tensors[i]`` replaces parameter ``i`` everywhere.

        The values of ``more`` are exchanged as well, and ``pack``, if given, saves tensors.
        """
        exchanges = [(values, {name: tensors[i]}) for values, name, i in self.places]
        exchanges += more
        before = [(values, {name: values[name] for name in new}) for values, new in exchanges]
        try:
            for values, new in exchanges:
                values.update(new)
            return saving(pack, call)
        finally:
            deque(starmap(dict.update, before), maxlen=0)  # see NOTE [ Interrupts ]


def stamp(parameter: Parameter) -> tuple[int, int]:
    """Return a value that changes when a parameter is written, except through ``.data``."""
    return parameter._version, parameter.data_ptr()


class Places:
    """Places in a layer of the parameters that satisfy ``waits``, read anew at each call."""

    def __init__(self, label: str, layer: Module, waits: Callable[[Parameter], bool]) -> None:
        self.label = label
        self._places = [
            (module, name)
            for module in layer.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and waits(parameter)
        ]

    def parameters(self) -> list[Parameter]:
        """Return the parameters that stand there now, without duplicates."""
        standing = [module._parameters.get(name) for module, name in self._places]
        return list({id(p): p for p in standing if p is not None}.values())

    def slice(self) -> Slice:
        """Return a slice of the parameters with which the layer computes now.

        Raises:
            OffloadError: A parameter has another name now, or is not on the host.
        """
        parameters = self.parameters()
        index = {id(parameter): i for i, parameter in enumerate(parameters)}
        places = []
        for module, name in self._places:
            where = f"a {type(module).__name__} in {self.label}"
            if name not in module._parameters:
                raise OffloadError(
                    f"{where} had a parameter {name!r} that waits on the host, and now has "
                    f"{list(module._parameters)}; expected the names of when offload_layers() was "
                    "called; close() its handle before parameters are pruned, normed or "
                    "parametrized, and call it again after that"
                )
            parameter = module._parameters[name]
            if parameter is None:
                continue
            if parameter.device != HOST:
                raise OffloadError(
                    f"parameter {name!r} of {where} is on {parameter.device}, expected {HOST}, "
                    "where it waits between uses; load a state that is on the host; close() the "
                    "handle of offload_layers() before parameters are replaced; move an "
                    "OffloadModel back with model.to('cpu'), and build a new one of "
                    "nn.Sequential(*model.children())"
                )
            places.append((module._parameters, name, index[id(parameter)]))
        return Slice(self.label, tuple(parameters), tuple(places))
