"""Has the parameters and buffers of a module stay on the device, also those it gets later.

A parameter may get other memory, and a module other parameters, without a word to anybody. So every
step looks at all of them, but only adds them to what is kept where it finds a storage, or a module,
that was not there the last time. That look is a few loops in C.

    watched = WatchedModule()
    watched.keep(stage.submod, eligibility.kept)   # before each step
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from itertools import chain
from operator import call, is_

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Module

from pp_offload._memory.storages import has_storage
from pp_offload._transfer.subclasses import plain_tensors
from pp_offload._transfer.tensors import StorageSet


class WatchedModule:
    """Keeps the storages of a module, and of those inside it, on the device."""

    def __init__(self) -> None:
        self._module: Module | None = None
        self._kept: StorageSet | None = None
        self._seen: _Contents | None = None

    def keep(self, module: Module, kept: StorageSet) -> None:
        """Add every parameter and buffer of ``module`` to ``kept``, unless all are known.

        Its dictionaries may change, but none may be put in place of one that was there.
        """
        if module is self._module and kept is self._kept:
            if self._seen is not None and self._seen.is_all_there_is():
                return
        self._seen = None  # if this is cut off, the next call adds them
        seen = _Contents(module)
        kept.add_module(module)
        self._module, self._kept, self._seen = module, kept, seen


class _Contents:
    """What a module had at one time; storages are held weakly."""

    def __init__(self, module: Module) -> None:
        modules = list(module.modules())
        # Views of dictionaries that go on: they show what comes and goes.
        tensors = [d for m in modules for d in (m._parameters, m._buffers)]
        inside = [m._modules for m in modules]
        self._empty = [d for d in (*tensors, *inside) if not d]
        self._tensors = [d.values() for d in tensors if d]
        self._inside = [d.values() for d in inside if d]
        self._modules = list(chain.from_iterable(self._inside))
        self._is_plain = all(map(has_storage, self._all_tensors()))
        self._is_live = not any(isinstance(m, torch.jit.ScriptModule) for m in modules)
        self._storages = list(map(weakref.ref, self._all_storages()))

    def is_all_there_is(self) -> bool:
        """Whether the module has no other storage now, and no other module."""
        try:
            found = self._all_storages()
        except Exception:  # a tensor that has no storage came in place of one
            return False
        return (
            self._is_live
            and not any(self._empty)
            and _are_same(chain.from_iterable(self._inside), self._modules)
            and _are_same(map(call, self._storages), found)
        )

    def _all_tensors(self) -> list[Tensor]:
        return [one for one in chain.from_iterable(self._tensors) if one is not None]

    def _all_storages(self) -> list[UntypedStorage]:
        tensors: Iterable[Tensor] = self._all_tensors()
        if not self._is_plain:
            inner = (plain for one in tensors for plain in plain_tensors(one))
            tensors = filter(has_storage, inner)
        return list(map(Tensor.untyped_storage, tensors))


def _are_same(now: Iterable[object], before: Iterable[object]) -> bool:
    """Whether these are the very same objects, in the same order, and as many."""
    return all(map(is_, chain(now, _END), chain(before, _END)))


_END = (object(),)
