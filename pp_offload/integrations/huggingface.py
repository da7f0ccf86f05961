"""Offload of activations, or of layers' parameters, in the ``Trainer`` of Hugging Face, of which
this imports nothing.

    class MyTrainer(ActivationOffloadingMixin, Trainer): ...

    trainer = MyTrainer(model, args, train_dataset=data, activation_offloading={"head": "lm_head"})

The trainer computes each loss inside ``compute_loss_context_manager``, where offload begins and
ends. An evaluation computes its loss there too, without grad, and offloads nothing.

    class LayerTrainer(LayerOffloadingMixin, Trainer): ...

    trainer = LayerTrainer(model, args, train_dataset=data, layer_offloading=True)

Layers are offloaded before the trainer moves its model to the device, so the device never holds all
of them. Other models, such as a reference model, are left alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Module

from pp_offload._common.checks import brief
from pp_offload._slices.offloaded_layers import OffloadedLayers
from pp_offload.activations import (
    OffloadActivations,
    OffloadHiddenStates,
    get_lora_act_offloading_ctx_manager,
)
from pp_offload.backends import default_backend
from pp_offload.config import OffloadConfig
from pp_offload.integrations.forwards import Figures
from pp_offload.layers import lists_of_layers, offload_layers

ONLY = "hidden_states"
"""Option that offloads only the hidden states given to checkpointed layers."""

MODES: dict[str, Mapping[str, Any] | bool] = {
    "off": False,
    "disk": {"config": OffloadConfig(tiers=("disk",))},
    "hidden_states": {ONLY: True},
    "legacy": {ONLY: True, "use_streams": False},
}
"""Words of other trainers for ``activation_offloading``, and their meaning here."""


class TrainerMixin:
    """Base of mixins, which do nothing unless they are before the trainer among the bases."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        bases = list(cls.__mro__)
        others = [base for base in bases if not issubclass(base, TrainerMixin)]
        trainer = next((base for base in others if hasattr(base, "training_step")), None)
        if trainer and bases.index(trainer) < bases.index(TrainerMixin):
            name = next(base.__name__ for base in bases if TrainerMixin in base.__bases__)
            raise TypeError(
                f"{cls.__name__} has {trainer.__name__} before {name}, which it never calls; "
                f"expected class {cls.__name__}({name}, {trainer.__name__})"
            )


@dataclass(slots=True, eq=False)
class OfModel:
    """Offload of a trainer's current model. The user has ``wanted`` options, True, False or one of
    ``words``; None leaves the choice to the trainer's arguments, where it has the same ``name``.
    """

    name: str
    wanted: object
    make: Callable[[Module, dict[str, Any], Any], Any]  # from model, options, arguments
    words: Mapping[str, Mapping[str, Any] | bool] = field(default_factory=dict)  # of others
    has_warned: bool = False
    model: Module | None = None
    made: Any = None

    def __post_init__(self) -> None:
        if self.wanted is not None:
            self.prepare(None, None)  # reports an error in the options now

    def prepare(self, args: Any, model: Module | None) -> Any:
        """Return the offload of a model; make it for a new model."""
        name, chosen = self.name, self.wanted
        if chosen is None:
            name, chosen = f"{name} of the trainer's arguments", getattr(args, name, True)
            if chosen is False and not self.has_warned:
                self.has_warned = True
                warnings.warn(
                    f"nothing is offloaded, for {name} is False; give the trainer "
                    f"{self.name}=True, or False to do without",
                    stacklevel=3,
                )
        if isinstance(chosen, str):
            chosen = self.words.get(chosen, chosen)
        if not isinstance(chosen, bool | Mapping):
            words = "".join(f", {word!r}" for word in self.words)
            raise ValueError(
                f"{name} is {brief(chosen)}, expected True, False{words} or a mapping of options"
            )
        if chosen is not False and model is not None and model is not self.model:
            self.made = self.make(model, {} if chosen is True else dict(chosen), args)
            self.model = model
        return self.made


class ActivationOffloadingMixin(TrainerMixin):
    """Mixin before a ``Trainer``, which offloads the tensors that each training forward saves.

    Args:
        args: Arguments of the trainer.
        activation_offloading: Options of
            :func:`pp_offload.activations.get_lora_act_offloading_ctx_manager`, except the model. If
            the ``TrainingArguments`` have an ``activation_offloading``, it decides whether anything
            is offloaded; options, True or False here override it. TRL's trainers begin an offload
            of their own if theirs is True: leave that False, and set this one. axolotl's words are
            valid in both places: ``"hidden_states"`` offloads only tensors given to checkpointed
            layers, like the option of that name; ``"legacy"`` does so without streams; ``"disk"``
            offloads all to disk; ``"off"`` nothing.
        kwargs: Further arguments of the trainer.

    Raises:
        TypeError: An option is unknown; or a trainer is before this one among the bases of a class.
        ValueError: The value of an option is invalid; or the choice whether anything is offloaded
            is neither True nor False, nor one of :data:`MODES`.

    Source: axolotl ``ActivationOffloadingMixin``.
    """

    def __init__(
        self,
        *args: Any,
        activation_offloading: Mapping[str, Any] | bool | str | None = None,
        **kwargs: Any,
    ) -> None:
        wanted = activation_offloading
        self._offloading = OfModel("activation_offloading", wanted, _make_offload, MODES)
        self._has_checked = False
        super().__init__(*args, **kwargs)
        self.activation_offload  # noqa: B018  reports an error in the options now

    @property
    def activation_offload(self) -> OffloadActivations | None:
        """Context of the model, with its ``statistics()``; None if nothing is offloaded.

        A model that ``model_init`` makes anew has a new context.
        """
        made = self._offloading.prepare(self.args, self.model)  # type: ignore[attr-defined]
        return None if made is None else made[0]

    def compute_loss_context_manager(self) -> ExitStack:
        """Return the trainer's context for a loss, with offload inside if grad is enabled."""
        stack: ExitStack = super().compute_loss_context_manager()  # type: ignore[misc]
        offload = self.activation_offload if torch.is_grad_enabled() else None
        if offload is not None:
            stack.enter_context(offload)
        return stack

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the trainer's step; warn after the first step if nothing was offloaded."""
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        if not self._has_checked and self._offloading.made is not None:
            self._has_checked = True
            _check(self._offloading.made[0])
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as the trainer does; with the training loss also log figures of this process.

        ``offload/bytes_offloaded`` and others, since the loss before: see
        :mod:`pp_offload.integrations.forwards`. Evaluation and summaries are logged as they are.
        """
        if "loss" in logs and self._offloading.made is not None:
            logs.update(self._offloading.made[1].since_last())
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


def _make_offload(
    model: Module, options: dict[str, Any], args: Any
) -> tuple[OffloadActivations, Figures]:
    """Make the context of a model, and figures for logs."""
    options["backend"] = options.get("backend") or default_backend(args.device)
    is_only = options.pop(ONLY, False)
    make: Any = OffloadHiddenStates if is_only else get_lora_act_offloading_ctx_manager
    offload: OffloadActivations = make(model, **options)
    return offload, Figures(offload.statistics)


def _check(offload: OffloadActivations) -> None:
    """Warn if the first step offloaded nothing."""
    if offload.statistics().bytes_offloaded:
        return
    saved = f"it saved no {offload.max_fwd_stash_size} tensors"
    if isinstance(offload, OffloadHiddenStates):
        saved = "no layer was checkpointed, or given hidden states"
    warnings.warn(
        "activation offload is on, but the first training step offloaded nothing: either "
        f"{saved} of at least {offload.min_offload_size} bytes on the device, or its forward did "
        "not run inside compute_loss_context_manager(), or on other threads (DataParallel)",
        stacklevel=3,
    )


class LayerOffloadingMixin(TrainerMixin):
    """Mixin, named before ``Trainer`` among base classes, that keeps parameters on the host.

    Args:
        args: Arguments of the trainer.
        layer_offloading: Options of :func:`pp_offload.offload_layers`, except the model.
            ``layers`` may be left out, for :func:`pp_offload.layers.lists_of_layers`, and
            ``frozen_only`` is True unless given: the frozen base waits on the host, and trained
            parameters stay on the device. If the ``TrainingArguments`` have a ``layer_offloading``,
            it decides whether anything is offloaded; options, True or False here override it.
        kwargs: Further arguments of the trainer.

    Raises:
        TypeError, ValueError: As :class:`ActivationOffloadingMixin` does.

    Source: axolotl ``LayerOffloadingMixin``.
    """

    def __init__(
        self, *args: Any, layer_offloading: Mapping[str, Any] | bool | None = None, **kwargs: Any
    ) -> None:
        self._layers = OfModel("layer_offloading", layer_offloading, _make_layers)
        super().__init__(*args, **kwargs)
        self._offload_layers()

    @property
    def layer_offload(self) -> OffloadedLayers | None:
        """Layers of the current model, with their figures; None if no layer is on the host."""
        return self._layers.made

    def _offload_layers(self) -> None:
        self._layers.prepare(self.args, getattr(self, "model", None))  # type: ignore[attr-defined]

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


def _make_layers(model: Module, wanted: dict[str, Any], args: Any) -> OffloadedLayers:
    """Offload the layers of a model."""
    options = {"frozen_only": True, **wanted}
    if not {"backend", "device"} & options.keys():
        options["backend"] = default_backend(args.device)
    layers = options.pop("layers", None) or lists_of_layers(model)
    return offload_layers(model, layers, **options)
