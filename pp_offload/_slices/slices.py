"""Slices of a stack of layers, and places of parameters, where device tensors stand meanwhile.

A place is a module and a name in it, not a parameter: the object there may be exchanged between
steps, as by ``load_state_dict(assign=True)``, and adapters give the module another parent.
While the layers compute, tensors on the device stand in the places. They are no parameters, so
the parameter's own data, device and version are never touched.

    places = Places("layers.0", layer, lambda parameter: not parameter.requires_grad)
    slice_ = places.slice()
    y = slice_.compute(tensors, call)  # a tensor for each of slice_.parameters

NOTE [ Interrupts ]
    A signal handler may raise where Python calls or loops, but never inside a call in C. So a
    single such call restores all places: an interrupt leaves no tensor where a parameter was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, starmap
from operator import or_
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter, Sequential

from pp_offload._common.checks import brief
from pp_offload._hooks import saving
from pp_offload._memory.addresses import has_storage
from pp_offload.errors import OffloadError

HOST = torch.device("cpu")

Exchange = tuple[dict[str, Any], dict[str, Any]]
"""A dict of attributes or parameters, and the values to hold in it while layers compute."""


@dataclass(frozen=True, eq=False, slots=True)
class Slice:
    """The parameters of some layers in a forward."""

    label: str
    parameters: tuple[Parameter, ...]  # on the host, each once
    # For each place, a module's parameters, a name in them, and an index of a tensor.
    places: tuple[tuple[dict[str, Any], str, int], ...]

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
        The values of ``more`` are exchanged as well, and ``pack``, if given, saves tensors. Raise
        an OffloadError if the layers changed a parameter, or put another in its place.
        """
        stamps = list(map(stamp, tensors))
        exchanges = [(values, {name: tensors[i]}) for values, name, i in self.places]
        exchanges += more
        before = [(values, {name: values[name] for name in new}) for values, new in exchanges]
        try:
            for values, new in exchanges:
                values.update(new)
            output = saving(pack, call)
            are_there = all([values.get(name) is tensors[i] for values, name, i in self.places])
            if not are_there or stamps != list(map(stamp, tensors)):
                raise OffloadError(
                    f"{self.label} changed one of its parameters in its forward, which would be "
                    "lost: it computes with a copy; make it a buffer"
                )
            return output
        finally:
            deque(starmap(dict.update, before), maxlen=0)  # see NOTE [ Interrupts ]


def stamp(parameter: Tensor) -> tuple[int, int]:
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
        """Return a slice of the parameters that stand there now; an OffloadError if one cannot."""
        parameters = self.parameters()
        index = {id(parameter): i for i, parameter in enumerate(parameters)}
        places = []
        for module, name in self._places:
            parameter = module._parameters[name]  # a KeyError if it was renamed, as by pruning
            if parameter is None:
                continue
            if parameter.device != HOST or not has_storage(parameter):
                raise OffloadError(
                    f"parameter {name!r} of a {type(module).__name__} in {self.label} is "
                    f"{brief(parameter)} on {parameter.device}, expected a plain one on {HOST}, "
                    "where it waits between uses; load a state that is on the host, and shard no "
                    "layers that wait; close() the handle of offload_layers() before parameters "
                    "are replaced; move an OffloadModel back with model.to('cpu'), and build a new "
                    "one of nn.Sequential(*model.children())"
                )
            places.append((module._parameters, name, index[id(parameter)]))
        return Slice(self.label, tuple(parameters), tuple(places))


class SliceLayers(Sequential):
    """Current layers of a slice, and the places of all their parameters."""

    def __init__(self, label: str, layers: Iterable[Module]) -> None:
        super().__init__(*layers)
        self.places = Places(label, self, lambda parameter: True)

    def forward(self, *inputs: Any) -> Any:
        first, *later_layers = self
        value = first(*inputs)
        del inputs
        for layer in later_layers:
            value = layer(value)
        return value


def partition(layers: Sequence[dict[int, int]], num_slices: int) -> list[range]:
    """Cut layers into consecutive slices of at least one layer, and return their indices. Slice k
    of n ends with the layer behind which there are nearest to k/n of all bytes. ``layers`` has the
    bytes of their parameters by identity: a shared parameter counts once.
    """
    sums = [sum(so_far.values()) for so_far in accumulate(layers, or_)]
    ends = [0]
    for number in range(1, num_slices):
        share = sums[-1] * number / num_slices
        last = len(layers) - num_slices + number
        later_first = range(last, ends[-1], -1)  # a layer that adds no bytes joins the slice before
        ends.append(min(later_first, key=lambda end: abs(sums[end - 1] - share)))
    return list(starmap(range, pairwise([*ends, len(layers)])))
