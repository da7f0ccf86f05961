"""Modules of a model whose names match a pattern, with or without wrappers.

    matching(model, "layers.*.mlp")  # ["layers.0._checkpoint_wrapped_module.mlp", ...]

Checkpoints, compilers and parallel wrappers add a part to the names of modules. A pattern may omit
these parts, or contain them as in ``named_modules()``.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Sequence

from torch.nn import Module

WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod", "module"})
"""Names under which PyTorch's wrappers hold the wrapped module."""


def matching(model: Module, patterns: str | Collection[str]) -> list[str]:
    """Return the names of the modules that match a pattern.

    A pattern that omits the names of wrappers matches the wrapper, not the module inside.
    """
    wanted = [pattern.split(".") for pattern in listed(patterns)]
    names = [name for name, _ in model.named_modules() if name]
    return [name for name in names if any(_fit(name.split("."), parts) for parts in wanted)]


def listed(patterns: str | Collection[str]) -> list[str]:
    """Return patterns as a list."""
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _fit(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    if not parts:
        return not wanted
    first, *rest = parts
    if wanted and _is_part(first, wanted[0]) and _fit(rest, wanted[1:]):
        return True
    return first in WRAPPERS and bool(rest) and _fit(rest, wanted)


def _is_part(part: str, want: str) -> bool:
    """Match a part of a name. A star stands for no wrapper, but for a module named ``module``."""
    if part in WRAPPERS and part != "module":
        return part == want
    return fnmatch.fnmatchcase(part, want)
