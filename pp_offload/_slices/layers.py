"""Consecutive layers that compute with other tensors in place of their parameters.

layers = SliceLayers("slice 0", modules, stand_ins)
y = layers.compute_with(tensors, x)  # a tensor for each of layers.slice.parameters
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Module, ModuleList, Parameter

from pp_offload._slices.cache import Slice, stamp
from pp_offload._slices.gradients import share_attributes
from pp_offload._slices.places import Place
from pp_offload._slices.recurrent import rnns_in
from pp_offload._slices.saved_parameters import SlicedRun, check_unchanged
from pp_offload._slices.stand_ins import StandIns


class SliceLayers(Module):
    """The layers of one slice, as they are now.

    Args:
        label: Of the slice, for messages.
        layers: In order; the first takes all inputs, each other one what the one before returned.
        stand_ins: Of the model, which outlives this.
    """

    def __init__(self, label: str, layers: Iterable[Module], stand_ins: StandIns) -> None:
        super().__init__()
        self._layers = ModuleList(layers)
        self._rnns = rnns_in(self._layers)
        self._stand_ins = stand_ins
        self._places: list[tuple[Place, int]] = []
        found: dict[int, int] = {}
        parameters: list[Parameter] = []
        for module in self.modules():  # each once, however many names it has
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in found:
                    found[id(parameter)] = len(parameters)
                    parameters.append(parameter)
                self._places.append((Place(module, name), found[id(parameter)]))
        self.slice = Slice(label, tuple(parameters))

    def compute_with(
        self,
        tensors: Sequence[Tensor],
        *inputs: Any,
        pack: Callable[[Tensor], Any] | None = None,
    ) -> Any:
        """The output, with ``tensors[i]`` in place of parameter ``i`` of the slice.

        Args:
            tensors: One for each parameter.
            inputs: Of the first layer.
            pack: The hook that saves tensors meanwhile, if any.
        """
        new = [place.taken_by(tensors[i]) for place, i in self._places]
        return self._stand_ins.compute(partial(self, *inputs), new, self._rnns, pack)

    def forward(self, *inputs: Any) -> Any:
        """As a Sequential does it."""
        first, *others = self._layers
        value = first(*inputs)
        del inputs
        for layer in others:
            value = layer(value)
        return value


class RecomputedLayers(Module):
    """The layers of a slice as a checkpoint calls them, now and again in backward.

    Args:
        layers: What is run.
        run: Brings their parameters when they are run again.
        index: Of the slice.
        tensors: Their parameters in forward, until :meth:`end_of_forward`.
    """

    def __init__(
        self, layers: SliceLayers, run: SlicedRun, index: int, tensors: Sequence[Tensor]
    ) -> None:
        super().__init__()
        self._layers = layers
        self._run = run
        self._index = index
        self._tensors: Sequence[Tensor] | None = tensors
        self._stamps = [stamp(parameter) for parameter in layers.slice.parameters]

    def end_of_forward(self) -> None:
        """Let the tensors go: from now on it runs in backward."""
        self._tensors = None

    def forward(self, *inputs: Any) -> Any:
        """What the layers return.

        Raises:
            SavedTensorModifiedError: A parameter was changed in place since the forward.
            OffloadError: Its memory was exchanged, or another thread is in the model's forward.
        """
        if self._tensors is not None:
            return self._layers.compute_with(self._tensors, *inputs)
        return self._run.cache.alone(self._compute_again, *inputs)

    def _compute_again(self, *inputs: Any) -> Any:
        return self._layers.compute_with(self._again(), *inputs)

    def _again(self) -> list[Tensor]:
        parameters = self._layers.slice.parameters
        if not parameters:
            return []
        for parameter, then in zip(parameters, self._stamps, strict=True):
            check_unchanged(parameter, then, self._layers.slice.label)
        brought = self._run.bring_back(self._index)
        tensors = [
            tensor.detach().requires_grad_(parameter.requires_grad)
            for tensor, parameter in zip(brought, parameters, strict=True)
        ]
        share_attributes(parameters, tensors)
        return tensors
