"""Finds modules as their forwards begin, for contexts that nobody has told the model.

    met = MetModules(see)
    met.begin()   # from now on see(module) for each whose forward begins, on any thread
    met.end()

NOTE [ One hook, in one place ]
    A compiler traces the hooks of all modules with each forward, and its code is for the places
    that they have in PyTorch's dict. PyTorch gives each registration a new place: code compiled in
    one forward would fit no other, and be made anew until the compiler gives up. So there is one
    hook for all contexts, always in one place; and it does nothing while it is traced.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch.nn import Module

from pp_offload._common.torch_private import forward_pre_hooks

See = Callable[[Module], None]

_PLACE = -1
"""PyTorch counts from zero."""

_seeing: dict[MetModules, See] = {}
_lock = threading.Lock()


class MetModules:
    """Sees modules between :meth:`begin` and :meth:`end`, except in compiled code.

    Args:
        see: Is given each.
    """

    def __init__(self, see: See) -> None:
        self._see = see

    def begin(self) -> None:
        """See modules from now on."""
        with _lock:
            _seeing[self] = self._see
            forward_pre_hooks[_PLACE] = _meet

    def end(self) -> None:
        """See no more of them. Twice is fine."""
        with _lock:
            _seeing.pop(self, None)
            if not _seeing:
                forward_pre_hooks.pop(_PLACE, None)


def _meet(module: Module, _: object) -> None:
    if torch.compiler.is_compiling():
        return
    for see in list(_seeing.values()):  # other threads begin and end
        see(module)
