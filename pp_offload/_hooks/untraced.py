"""Hooks that a compiler does not look into.

Autograd calls a pack hook from inside an operator. Where ``torch.compile`` leaves a forward as it
is, it compiles each function that is called there instead, the hook as well. And a compiled
backward has the unpack hooks in it.

    hook = Untraced(pack, group)   # as functools.partial
    hook = untraced(unpack)        # a function without arguments of its own
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

COMPILER = "torch._dynamo"
"""Importing it takes seconds. Where nobody has, nothing is compiled."""


class Untraced(partial):  # type: ignore[type-arg]
    """A function with some arguments, which runs as it is, whatever is compiled around it."""

    def __new__(cls, function: Callable[..., Any], *args: Any) -> Untraced:
        if COMPILER in sys.modules:
            return super().__new__(cls, _as_it_is(), function, *args)
        return super().__new__(cls, function, *args)


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which runs as it is, whatever is compiled around it."""
    if COMPILER not in sys.modules:
        return function
    if function not in _UNTRACED:
        _UNTRACED[function] = Untraced(function)
    return _UNTRACED[function]


_UNTRACED: dict[Callable[..., Any], Untraced] = {}
"""Of each function, for every group asks for it. No ``functools.cache``: a compiler looks into that
where it is called, and warns.
"""

_CALLERS: list[Callable[..., Any]] = []
"""The caller below, once it is made: making it takes longer than calling it."""


def _as_it_is() -> Callable[..., Any]:
    if not _CALLERS:
        _CALLERS.append(torch.compiler.disable(_call))
    return _CALLERS[0]


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)
