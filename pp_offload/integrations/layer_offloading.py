"""Offload of layers' parameters in the ``Trainer`` of Hugging Face, of which this imports nothing.

    class MyTrainer(LayerOffloadingMixin, Trainer): ...

    trainer = MyTrainer(model, args, train_dataset=data, layer_offloading=True)

Layers are offloaded before the trainer moves its model to the device, so the device never holds all
of them. Other models, such as a reference model, are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn import Module

from pp_offload._slices.offloaded_layers import OffloadedLayers
from pp_offload.backends import default_backend
from pp_offload.integrations.huggingface import OfModel, TrainerMixin
from pp_offload.layers import lists_of_layers, offload_layers


class LayerOffloadingMixin(TrainerMixin):
    """Mixin before a ``Trainer``, which keeps parameters of layers on the host.

    Args:
        args: Arguments of the trainer.
        layer_offloading: Options of :func:`pp_offload.offload_layers`, except the model.
            ``layers`` may be left out, for :func:`pp_offload.layers.lists_of_layers`, and
            ``frozen_only`` is True unless given: the frozen base waits on the host, and trained
            parameters stay on the device. If the ``TrainingArguments`` have a ``layer_offloading``,
            it decides whether anything is offloaded; options, True or False here override it.
            kwargs: Further arguments of the trainer.

    Raises:
        TypeError: An option is unknown; or a trainer is before this one among the bases of a class.
        ValueError: The value of an option is invalid; or the choice whether anything is offloaded
            is neither True nor False.

    Source: axolotl ``LayerOffloadingMixin``.
    """

    def __init__(
        self, *args: Any, layer_offloading: Mapping[str, Any] | bool | None = None, **kwargs: Any
    ) -> None:
        self._layers = OfModel("layer_offloading", layer_offloading, _made)
        super().__init__(*args, **kwargs)
        self._offload_layers()

    @property
    def layer_offload(self) -> OffloadedLayers | None:
        """Layers of the current model, with their figures; None if no layer is on the host."""
        return self._layers.made

    def _offload_layers(self) -> None:
        args, model = self.args, getattr(self, "model", None)  # type: ignore[attr-defined]
        self._layers.prepare(args, model)

    def _move_model_to_device(self, model: Module, device: Any) -> None:
        """Offload the layers, and move the rest as the trainer does."""
        # A trainer moves its model before it has one; the first model moved is then the trainer's.
        trained = [getattr(self, "model", None), self._layers.model, model]
        if model is next(each for each in trained if each is not None):
            self._layers.prepare(self.args, model)  # type: ignore[attr-defined]
        super()._move_model_to_device(model, device)  # type: ignore[misc]

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Offload the layers of a model that was not moved, and create the optimizer."""
        self._offload_layers()
        return super().create_optimizer(*args, **kwargs)  # type: ignore[misc]


def _made(model: Module, wanted: dict[str, Any], args: Any) -> OffloadedLayers:
    """Offload the layers of a model."""
    options = {"frozen_only": True, **wanted}
    if not {"backend", "device"} & options.keys():
        options["backend"] = default_backend(args.device)
    layers = options.pop("layers", None) or lists_of_layers(model)
    return offload_layers(model, layers, **options)
