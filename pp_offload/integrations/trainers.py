"""Common parts of the mixins for Hugging Face's ``Trainer``; nothing of it is imported here.

class MyMixin(TrainerMixin): ...                          # before the trainer among bases
offload = OfModel("my_offloading", wanted, OPTIONS, make)
offload.prepare(trainer.args, trainer.model)              # None if nothing is offloaded
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch.nn import Module

from pp_offload._common.checks import brief, check_names

Made = TypeVar("Made")


class TrainerMixin:
    """Base of mixins, which must come before the trainer among the bases of a class."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        bases = list(cls.__mro__)
        others = [base for base in bases if not issubclass(base, TrainerMixin)]
        trainer = next((base for base in others if hasattr(base, "training_step")), None)
        if trainer and bases.index(trainer) < bases.index(TrainerMixin):
            names = ", ".join(base.__name__ for base in bases if TrainerMixin in base.__bases__)
            raise TypeError(
                f"{cls.__name__} has {trainer.__name__} before {names}, which it never calls; "
                f"expected class {cls.__name__}({names}, transformers.Trainer)"
            )


class OfModel(Generic[Made]):
    """Offload of a trainer's current model, as its user and its arguments choose.

    Args:
        name: Name of the choice, which the trainer's arguments may have as well.
        wanted: Options, True, False or a word; None leaves the choice to the trainer's arguments.
        names: Names of all options.
        make: Makes the offload of a model, from the model, options and the trainer's arguments.
        words: Words of other trainers for options, or for False.

    Attributes:
        made: Offload of ``model``, the model that was prepared last.
    """

    def __init__(
        self,
        name: str,
        wanted: object,
        names: Sequence[str],
        make: Callable[[Module, dict[str, Any], Any], Made],
        words: Mapping[str, Mapping[str, Any] | bool] | None = None,
    ) -> None:
        self._name, self._wanted, self._make, self._words = name, wanted, make, words or {}
        self._names = names
        self._has_warned = False
        self.model: Module | None = None
        self.made: Made | None = None
        if wanted is not None:
            self._options_of(name, wanted)

    def prepare(self, args: Any, model: Module | None) -> Made | None:
        """Return the offload of a model; make it for a new model.

        Raises:
            ValueError: The choice is neither True nor False nor a word nor, unless it is in the
                trainer's arguments, a mapping of options; or an option is unknown.
        """
        name, chosen = self._name, self._wanted
        if chosen is None:
            name, chosen = f"{name} of the trainer's arguments", getattr(args, name, True)
            if isinstance(chosen, Mapping):
                raise ValueError(
                    f"{name} is {brief(chosen)}, expected True or False; give options to the "
                    "trainer"
                )
            if chosen is False and not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"nothing is offloaded, for {name} is False, and the trainer was given no "
                    f"{self._name}; expected {self._name}=True for the trainer, or False to do "
                    "without",
                    stacklevel=3,
                )
        options = self._options_of(name, chosen)
        if options is not None and model is not None and model is not self.model:
            self.made = self._make(model, options, args)
            self.model = model
        return self.made

    def _options_of(self, name: str, chosen: object) -> dict[str, Any] | None:
        if isinstance(chosen, str):
            chosen = self._words.get(chosen, chosen)
        if isinstance(chosen, bool):
            return {} if chosen else None
        if not isinstance(chosen, Mapping):
            words = "".join(f", {word!r}" for word in self._words)
            raise ValueError(
                f"{name} is {brief(chosen)}, expected True, False{words} or a mapping of options; "
                "leave it out to follow the trainer's arguments"
            )
        check_names(chosen, self._names, of=name)
        return dict(chosen)
