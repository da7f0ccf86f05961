"""Which modules of a model a pattern of names is for, whatever wraps them.

    matching(model, "layers.*.mlp")  # ["layers.0._checkpoint_wrapped_module.mlp", ...]

Checkpoints, compilers and parallel wrappers put a part of their own into the names of what they
wrap. A user writes names as in the model, in ``named_modules()``, or in a state dict, which leaves
out some of those parts.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Sequence

from torch.nn import Module

WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod", "module"})
"""Under these names wrappers of PyTorch keep what they wrap."""


def matching(model: Module, patterns: str | Collection[str]) -> list[str]:
    """Names of the modules that one of the patterns is for."""
    wanted = listed(patterns)
    return [
        name
        for name, _ in model.named_modules()
        if name and any(_fits(name, pattern) for pattern in wanted)
    ]


def listed(patterns: str | Collection[str]) -> list[str]:
    """One pattern, or several, as a list."""
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _fits(name: str, pattern: str) -> bool:
    """Whether a pattern is for a name, or for the same without some of what checkpoints, compilers
    and parallel wrappers put into it: a state dict leaves out some of them. Of a wrapper and what
    it wraps, the wrapper has the name without.
    """
    return _fit(name.split("."), pattern.split("."))


def _fit(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    if not parts:
        return not wanted
    first, *rest = parts
    if wanted and _is_part(first, wanted[0]) and _fit(rest, wanted[1:]):
        return True
    return first in WRAPPERS and bool(rest) and _fit(rest, wanted)


def _is_part(part: str, want: str) -> bool:
    """A star is no wrapper, or what is wrapped would be one more module; but a user may have called
    a module ``module``.
    """
    if part in WRAPPERS and part != "module":
        return part == want
    return fnmatch.fnmatchcase(part, want)
