"""Observes modules whose forward begins, for contexts that were not given the model.

NOTE [ One hook, in one place ]
    A compiler traces the hooks of all modules with each forward, and its code is for the places
    that they have in PyTorch's dict. PyTorch gives each registration a new place, so code compiled
    in one forward would fit no other. So there is one hook for all contexts, always in one place;
    and it does nothing while it is traced.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch.nn import Module

from pp_offload._common.torch_private import forward_pre_hooks

_PLACE = -1
"""Place of the hook; PyTorch counts from zero."""

_seeing: dict[MetModules, Callable[[Module], None]] = {}
_lock = threading.Lock()


class MetModules:
    """Hook that calls ``see`` with each module whose forward begins, between :meth:`begin` and
    :meth:`end`. Modules in compiled code are not seen.
    """

    def __init__(self, see: Callable[[Module], None]) -> None:
        self._see = see

    def begin(self) -> None:
        with _lock:
            _seeing[self] = self._see
            forward_pre_hooks[_PLACE] = _meet

    def end(self) -> None:
        with _lock:
            _seeing.pop(self, None)
            if not _seeing:
                forward_pre_hooks.pop(_PLACE, None)


def _meet(module: Module, _: object) -> None:
    if not torch.compiler.is_compiling():
        for see in list(_seeing.values()):  # a copy: other threads begin and end
            see(module)
