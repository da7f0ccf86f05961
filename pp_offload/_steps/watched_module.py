"""Has the parameters and buffers of a module stay on the device, also those it gets later.

A parameter may get other memory, and a module other parameters, without a word to anybody. So every
step looks at all of them, in a few loops in C. Only where one of them has a storage that was not
there the last time is it added to what is kept.

    watched = WatchedModule()
    watched.keep(stage.submod, eligibility.kept)   # before each step
"""

from __future__ import annotations

import weakref
from itertools import chain
from operator import is_, methodcaller

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Module

from pp_offload._core.subclasses import plain_tensors
from pp_offload._core.tensors import StorageSet
from pp_offload._memory.storages import has_storage

_called = methodcaller("__call__")
"""What a weak reference refers to; as ``operator.call``, which Python 3.10 has not."""


class WatchedModule:
    """Keeps the storages of a module, and of those inside it, on the device."""

    def __init__(self) -> None:
        self._kept: StorageSet | None = None
        self._tree: _Tree | None = None
        self._is_plain = False
        self._storages: list[weakref.ref[UntypedStorage]] = []

    def keep(self, module: Module, kept: StorageSet) -> None:
        """Add every parameter and buffer of ``module`` to ``kept``, unless all are known.

        Its dictionaries may change, but none may be put in place of one that was there.
        """
        tree = self._tree
        if tree is None or tree.root is not module or tree.has_changed():
            tree = _Tree(module)
        elif kept is self._kept and self._has_same_storages(tree):
            return
        known = {ref() for ref in self._storages} if kept is self._kept else set()
        self._storages = []  # if this is cut off, the next call adds them
        tensors = tree.tensors()
        self._is_plain = all(map(has_storage, tensors))
        tensors = self._with_storage(tensors)
        storages = list(map(Tensor.untyped_storage, tensors))
        for tensor, storage in zip(tensors, storages, strict=True):
            if storage not in known:
                kept.add(tensor)
        self._kept, self._tree = kept, tree
        self._storages = list(map(weakref.ref, storages))

    def _has_same_storages(self, tree: _Tree) -> bool:
        before = map(_called, self._storages)
        try:
            now = map(Tensor.untyped_storage, self._with_storage(tree.tensors()))
            return list(before) == list(now)  # equal means the very same
        except Exception:  # a tensor that has no storage came in place of one
            return False

    def _with_storage(self, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors with storage among these, and inside them."""
        if self._is_plain:
            return tensors
        return [plain for one in tensors for plain in plain_tensors(one) if has_storage(plain)]


class _Tree:
    """The modules that ``root`` had at one time, and the tensors they have now."""

    def __init__(self, root: Module) -> None:
        self.root = root
        modules = list(root.modules())
        # Views of dictionaries that go on: they show what comes and goes.
        tensors = [d for m in modules for d in (m._parameters, m._buffers)]
        inside = [m._modules for m in modules]
        self._empty = [d for d in (*tensors, *inside) if not d]
        self._tensors = [d.values() for d in tensors if d]
        self._inside = [d.values() for d in inside if d]
        self._modules = list(chain.from_iterable(self._inside))
        self._is_live = not any(isinstance(m, torch.jit.ScriptModule) for m in modules)

    def has_changed(self) -> bool:
        """Whether there are other modules now, or tensors in dictionaries that had none."""
        now = list(chain.from_iterable(self._inside))
        is_same = len(now) == len(self._modules) and all(map(is_, now, self._modules))
        return not is_same or any(self._empty) or not self._is_live

    def tensors(self) -> list[Tensor]:
        """The parameters and buffers there are now."""
        return [one for one in chain.from_iterable(self._tensors) if one is not None]
