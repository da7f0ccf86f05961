"""What classes that are named before a ``Trainer`` have in common.

    check_bases(cls, Mixin)                          # when a class is made of one
    check_trainer(type(self), Mixin)                 # when it is used
    wanted = meant("layer_offloading", wanted)       # what its user asked for

Nothing of Hugging Face is imported here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from pp_offload._common.checks import said

CONTEXT = "compute_loss_context_manager"
"""A class that has it is a trainer."""

Wanted = Mapping[str, Any] | bool | None
"""Options, or whether anything is offloaded; None where that is left open."""


def meant(
    name: str, wanted: object, words: Mapping[str, Mapping[str, Any] | bool] | None = None
) -> Wanted:
    """What somebody who gave this has asked for.

    Args:
        name: Of the argument, for the message.
        wanted: What was given.
        words: Words for some of it.

    Raises:
        ValueError: It is none of :data:`Wanted`, and no word for one.
    """
    words = words or {}
    if isinstance(wanted, str) and wanted in words:
        return words[wanted]
    if isinstance(wanted, Mapping | bool | None):
        return wanted
    known = "".join(f", {word!r}" for word in words)
    raise ValueError(
        f"{name} is {said(wanted)}, expected True, False{known} or a mapping of options; leave it "
        "out to follow the trainer's arguments"
    )


def check_bases(kind: type, mixin: type) -> None:
    """Check that no trainer is before a mixin, where it would never ask the mixin.

    Raises:
        TypeError: One is, and none behind.
    """
    others = [base for base in kind.__mro__ if not issubclass(base, mixin)]
    if not _has_trainer(kind, mixin) and any(
        {CONTEXT, "train"} <= vars(base).keys() for base in others
    ):
        raise _no_trainer(kind, mixin)


def check_trainer(kind: type, mixin: type) -> None:
    """Check that a trainer is behind a mixin.

    Raises:
        ImportError: None is, and ``transformers`` is not installed.
        TypeError: None is.
    """
    if not _has_trainer(kind, mixin):
        raise _no_trainer(kind, mixin)


def _has_trainer(kind: type, mixin: type) -> bool:
    """Whether what a mixin calls in ``kind`` is there."""
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
