"""Common parts of the mixins for a ``Trainer`` of Hugging Face.

    check_bases(cls, Mixin)                          # when a class is made of one
    check_trainer(type(self), Mixin)                 # when it is used
    choice = Choice("layer_offloading", wanted, OPTIONS)
    choice.options(trainer.args)                     # None where nothing is offloaded

Nothing of Hugging Face is imported here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from pp_offload._common.checks import check_known, said

CONTEXT = "compute_loss_context_manager"
"""A class that has this method is a trainer."""

Words = Mapping[str, Mapping[str, Any] | bool]
"""Words of other trainers for options, or for whether anything is offloaded."""


class Choice:
    """Choice of the user and of the trainer's arguments: whether and how to offload.

    Args:
        name: Name of the argument, which the trainer's arguments may have as well.
        wanted: Options, True, False or a word; None leaves the choice to the trainer's arguments.
        options: Names of all options.
        words: Words for some choices.

    Raises:
        ValueError: ``wanted`` is something else, or an option is unknown.
    """

    def __init__(
        self, name: str, wanted: object, options: Sequence[str], words: Words | None = None
    ) -> None:
        self._name, self._words = name, words or {}
        self._wanted = self._meaning(name, wanted)
        if isinstance(self._wanted, Mapping):
            check_known(self._wanted, options, of=name)

    def options(self, args: Any) -> dict[str, Any] | None:
        """Options of the offload; None if nothing is offloaded.

        Args:
            args: The trainer's arguments.

        Raises:
            ValueError: The arguments have neither True nor False there, nor a word.
        """
        wanted = self._wanted
        if wanted is None:
            name = f"{self._name} of the trainer's arguments"
            given = getattr(args, self._name, True)
            if isinstance(given, Mapping):
                raise ValueError(
                    f"{name} is {said(given)}, expected True or False; give options here"
                )
            wanted = self._meaning(name, given)
        if isinstance(wanted, Mapping):
            return dict(wanted)
        return {} if wanted else None

    def _meaning(self, name: str, wanted: object) -> Mapping[str, Any] | bool | None:
        if isinstance(wanted, str) and wanted in self._words:
            return self._words[wanted]
        if isinstance(wanted, Mapping | bool | None):
            return wanted
        words = "".join(f", {word!r}" for word in self._words)
        raise ValueError(
            f"{name} is {said(wanted)}, expected True, False{words} or a mapping of options; leave "
            "it out to follow the trainer's arguments"
        )


def check_bases(kind: type, mixin: type) -> None:
    """Check that no trainer is before a mixin, where it would never call the mixin.

    Raises:
        TypeError: A trainer is before the mixin, and none behind.
    """
    bases = [base for base in kind.__mro__ if not issubclass(base, mixin)]
    if not _has_trainer(kind, mixin) and any(
        {CONTEXT, "train"} <= vars(base).keys() for base in bases
    ):
        raise _no_trainer(kind, mixin)


def check_trainer(kind: type, mixin: type) -> None:
    """Check that a trainer is behind a mixin.

    Raises:
        ImportError: No trainer is, and ``transformers`` is not installed.
        TypeError: No trainer is.
    """
    if not _has_trainer(kind, mixin):
        raise _no_trainer(kind, mixin)


def _has_trainer(kind: type, mixin: type) -> bool:
    """Whether ``kind`` has the methods that a mixin calls."""
    return hasattr(super(mixin, kind), CONTEXT)  # type: ignore[misc]


def _no_trainer(kind: type, mixin: type) -> Exception:
    if importlib.util.find_spec("transformers") is None:
        return ImportError(
            f"{kind.__name__} has no Trainer among its bases, and transformers is not installed; "
            "pip install 'pp_offload[hf]'"
        )
    return TypeError(
        f"{kind.__name__} has no Trainer behind {mixin.__name__}; expected "
        f"class {kind.__name__}({mixin.__name__}, transformers.Trainer)"
    )
