"""Offload of layers' parameters in the ``Trainer`` of Hugging Face.

    class MyTrainer(LayerOffloadingMixin, Trainer): ...

    trainer = MyTrainer(model, args, train_dataset=data, layer_offloading=True)
    trainer.train()
    trainer.layer_offload.peak_parameter_bytes_on_device

The layers are offloaded when the trainer moves its model to the device, before anything is moved,
so that the device never has all of them, and stay on the host when it moves the model again. Other
models, such as a reference model, are left alone. Nothing of Hugging Face is imported here.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch.nn import Module

from pp_offload._slices.offloaded_layers import OffloadedLayers
from pp_offload.backends import default_backend
from pp_offload.integrations.trainers import Choice, check_bases, check_trainer
from pp_offload.layers import lists_of_layers, offload_layers

OPTIONS = tuple(inspect.signature(offload_layers).parameters)[1:]
"""Options of ``layer_offloading``."""


class LayerOffloadingMixin:
    """Mixin for a ``Trainer``, which keeps parameters of layers on the host.

    Args:
        args: The trainer's.
        layer_offloading: Options of :func:`pp_offload.offload_layers`, apart from the model, where
            ``layers`` may be left out, for :func:`pp_offload.layers.lists_of_layers`, and
            ``frozen_only`` is True unless given: the frozen base waits on the host, and what is
            trained stays on the device. Where the ``TrainingArguments`` have a ``layer_offloading``
            of their own, that one says whether anything is offloaded; options, True or False here
            override it.
        kwargs: The trainer's.

    Raises:
        ImportError: No trainer is among the bases, and ``transformers`` is not installed.
        TypeError: No trainer is among the bases, or only before this one.
        ValueError: An option is unknown, or its value cannot be right; or what says whether
            anything is offloaded is neither True nor False.

    Source: axolotl ``LayerOffloadingMixin``.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_bases(cls, LayerOffloadingMixin)

    def __init__(
        self, *args: Any, layer_offloading: Mapping[str, Any] | bool | None = None, **kwargs: Any
    ) -> None:
        check_trainer(type(self), LayerOffloadingMixin)
        self._layer_offloading = _LayerOffloading(layer_offloading)
        super().__init__(*args, **kwargs)
        self._layer_offloading.prepare(self, getattr(self, "model", None))

    @property
    def layer_offload(self) -> OffloadedLayers | None:
        """Layers of the current model, with their figures; None if no layer is on the host."""
        return self._layer_offloading.offloaded

    def _move_model_to_device(self, model: Module, device: Any) -> None:
        """Offload the layers, and move the rest as the trainer does."""
        if model is self._layer_offloading.model_of(self, model):
            self._layer_offloading.prepare(self, model)
        super()._move_model_to_device(model, device)  # type: ignore[misc]

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Offload the layers of a model that was not moved, and create the optimizer."""
        self._layer_offloading.prepare(self, getattr(self, "model", None))
        return super().create_optimizer(*args, **kwargs)  # type: ignore[misc]


class _LayerOffloading:
    """Offload of a trainer.

    Attributes:
        offloaded: What :func:`pp_offload.offload_layers` returned for the last model.
    """

    def __init__(self, wanted: Mapping[str, Any] | bool | None) -> None:
        self._choice = Choice("layer_offloading", wanted, OPTIONS)
        self._model: Module | None = None
        self.offloaded: OffloadedLayers | None = None

    def model_of(self, trainer: Any, moved: Module) -> Module:
        """Return the model that a trainer trains; before it has one, the first that it moves."""
        model: Module | None = getattr(trainer, "model", None)
        if model is None:
            model = self._model
        return moved if model is None else model

    def prepare(self, trainer: Any, model: Module | None) -> None:
        """Offload the layers of a model, unless that was done."""
        if model is None or model is self._model:
            return
        wanted = self._choice.options(trainer.args)
        if wanted is None:
            return
        options = {"frozen_only": True, **wanted}
        if not {"backend", "device"} & options.keys():
            options["backend"] = default_backend(trainer.args.device)
        layers = options.pop("layers", None) or lists_of_layers(model)
        self.offloaded = offload_layers(model, layers, **options)
        self._model = model
