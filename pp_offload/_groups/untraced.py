"""Hooks that a compiler does not look into.

Autograd calls a pack hook from inside an operator. Where ``torch.compile`` leaves a forward as it
is, it compiles each function that is called there instead, and would take the hook for one. And a
backward that is compiled has the unpack hooks in it.

    hook = Untraced(pack, group)   # as functools.partial
    hook = untraced(unpack)        # a function without arguments of its own
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
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
    return _untraced(function) if COMPILER in sys.modules else function


@cache
def _untraced(function: Callable[..., Any]) -> Untraced:
    """One for each function, for one is wanted at every group."""
    return Untraced(function)


@cache
def _as_it_is() -> Callable[..., Any]:
    """Calls what it is given. One for all: making it takes longer than calling it."""

    def call(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    return torch.compiler.disable(call)
