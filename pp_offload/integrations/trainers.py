"""What the mixins for Hugging Face's ``Trainer`` share; nothing of it is imported here.

offload = OfModel("my_offloading", wanted, make)
offload.prepare(trainer.args, trainer.model)              # None if nothing is offloaded
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from torch.nn import Module

from pp_offload._common.checks import brief

Made = TypeVar("Made")


class OfModel(Generic[Made]):
    """Offload of a trainer's current model, as its user and its arguments choose.

    Args:
        name: Name of the choice, which the trainer's arguments may have as well.
        wanted: Options, True, False or a word; None leaves the choice to the trainer's arguments.
        make: Makes the offload of a model, from the model, options and the trainer's arguments.
        words: Words of other trainers for options, or for False.

    Attributes:
        made: Offload of ``model``, the model that was prepared last.
    """

    def __init__(
        self,
        name: str,
        wanted: object,
        make: Callable[[Module, dict[str, Any], Any], Made],
        words: Mapping[str, Mapping[str, Any] | bool] | None = None,
    ) -> None:
        self._name, self._wanted, self._make, self._words = name, wanted, make, words or {}
        self._has_warned = False
        self.model: Module | None = None
        self.made: Made | None = None
        if wanted is not None:
            self._options_of(name, wanted)

    def prepare(self, args: Any, model: Module | None) -> Made | None:
        """Return the offload of a model; make it for a new model.

        Raises:
            ValueError: The choice is neither True nor False, nor a word, nor a mapping of options.
        """
        name, chosen = self._name, self._wanted
        if chosen is None:
            name, chosen = f"{name} of the trainer's arguments", getattr(args, name, True)
            if chosen is False and not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"nothing is offloaded, for {name} is False; give the trainer "
                    f"{self._name}=True, or False to do without",
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
                f"{name} is {brief(chosen)}, expected True, False{words} or a mapping of options"
            )
        return dict(chosen)
