"""Decides which saved tensors may leave the device.

NOTE [ Statistics ]
    A small vector that needs no gradient may hold statistics that batch norm, or an observer, keeps
    from batch to batch. Their kernels write it and count no change, also while a copy of it runs,
    or after a copy that another group would share. Autograd reads its values at the backward, so it
    has to stay. A module's buffer may be marked as such, but not in every product.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from pp_offload._core.saved import plain_tensors
from pp_offload._memory.addresses import has_storage

FLAGGED_DTYPES = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and (dtype.is_complex or str(dtype).startswith("torch.q"))
)
"""Dtypes of tensors that may be quantized or lazily conjugated. Tensors of other dtypes skip these
checks, which would run at every save. Any tensor may be lazily negated.
"""

MAX_STATISTICS = 2**14  # elements of a vector of statistics; batch norm has one a channel

MARKS = frozenset({"_TE_do_not_offload", "weight_offloading", "_do_not_offload"})
"""Attributes of a tensor that must stay when autograd saves it. Transformer Engine sets the first,
old versions the second: see NOTE [ Transformer Engine ]. Megatron-LM sets the third.
"""


class _KeyedRef(weakref.ref[torch.UntypedStorage]):
    """Weak reference to a storage, with its key, which outlives the storage."""

    __slots__ = ("key",)
    key: int


class StorageSet:
    """Storages by identity, held weakly: an address used again is not mistaken for the old one.

    Any thread may add and look up. Entries of freed storages are removed later, for autograd may
    free a marked tensor, and Python code that runs there would swallow exceptions.
    """

    def __init__(self) -> None:
        self.refs: dict[int, _KeyedRef] = {}  # a missing key proves absence; for others, ask has()
        self._gone: deque[_KeyedRef] = deque()
        self._lock = threading.Lock()  # an address may be added anew while its old entry is removed

    def add(self, tensor: Tensor) -> None:
        """Add the storages of ``tensor`` and of inner tensors; skip a tensor without storage."""
        for plain in plain_tensors(tensor):
            if has_storage(plain):
                self.add_storage(plain.untyped_storage())

    def add_storage(self, storage: torch.UntypedStorage) -> None:
        """Add one storage."""
        key = storage._cdata
        ref = _KeyedRef(storage, self._gone.append)
        ref.key = key
        with self._lock:
            self.refs[key] = ref
            while self._gone:
                gone = self._gone.popleft()
                if self.refs.get(gone.key) is gone:
                    del self.refs[gone.key]

    def add_module(self, module: Module) -> None:
        for tensor in (*module.parameters(), *module.buffers()):
            self.add(tensor)

    def add_gathered(self, module: Module) -> None:
        """Add the parameters that FSDP has gathered for the forward of this module."""
        for parameter in module.parameters(recurse=False):
            self.add(parameter)
        for child in module.children():
            if not is_sharded(child):
                self.add_gathered(child)

    def __contains__(self, tensor: Tensor) -> bool:
        return has_storage(tensor) and self.has(tensor.untyped_storage())

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Whether this very storage is in the set."""
        ref = self.refs.get(storage._cdata)
        return ref is not None and ref() is storage


def is_sharded(module: Module) -> bool:
    """Whether ``fully_shard`` was applied. By name: to import FSDP takes long, and few use it."""
    return any([kind.__name__ == "FSDPModule" for kind in type(module).__mro__])


def may_be_statistics(tensor: Tensor) -> bool:
    """See NOTE [ Statistics ]."""
    return tensor.dim() <= 1 and not tensor.requires_grad and tensor.is_floating_point()


def is_marked(tensor: Tensor) -> bool:
    """Whether a tensor, or a part of a quantized one of Transformer Engine, has a true mark."""
    parts: Any = tensor.get_data_tensors() if hasattr(tensor, "get_data_tensors") else ()
    parts = [part for part in (tensor, *parts) if part is not None]
    return any(part.__dict__.get(mark) for part in parts for mark in MARKS)


class Eligibility:
    """Decides which saved tensors may leave the device; tensors on others stay there."""

    def __init__(self, device: torch.device, residents: StorageSet) -> None:
        self.device = device
        self.residents = residents  # parameters, buffers and marked tensors: they and views stay
        self.elsewhere: torch.device | None = None  # of the last tensor on another device
        # Shape of the largest tensor that is too small to leave, by name of the group; None if not
        # recorded.
        self.largest_small: dict[str, torch.Size] | None = None

    def note_small(self, name: str, tensor: Tensor) -> None:
        """Record a saved tensor of a group that has too few elements to leave."""
        sizes = self.largest_small
        if sizes is not None and tensor.device == self.device and self.admits(tensor, 1):
            sizes[name] = max(sizes.get(name, tensor.shape), tensor.shape, key=torch.Size.numel)

    def elsewhere_advice(self) -> str:
        """Return advice on tensors saved on another device; empty without any."""
        if self.elsewhere is None:
            return ""
        return (
            f"tensors on {self.elsewhere} were saved, and this engine works on {self.device}: make "
            "the device of the model the current one before the engine is first used, or give a "
            "backend of it"
        )

    def admits(self, tensor: Tensor, min_numel: int) -> bool:
        """Whether ``tensor`` may be offloaded when autograd saves it.

        True for a plain tensor of at least ``min_numel`` elements that is dense memory on the
        device, is not resident and cannot be statistics. Its bytes alone must define it: the flag
        of a lazily conjugated or negated tensor is not part of them, and the zeros that
        forward-mode AD makes have none. A parameter, a view of one, or a tensor with one of
        :data:`MARKS` is resident from now on.
        """
        if type(tensor) is not Tensor:
            is_plain = type(tensor) is Parameter and tensor.layout is torch.strided
            if is_plain and self.residents.has(tensor.untyped_storage()):
                return False
            is_of_model = isinstance(tensor, Parameter) or isinstance(tensor._base, Parameter)
            if is_of_model or is_marked(tensor):
                self.residents.add(tensor)
            return False
        numel = tensor.numel()
        if numel < min_numel or numel == 0:  # first: most tensors that stay are small
            return False
        if tensor.__dict__ and is_marked(tensor):
            self.residents.add(tensor)  # while it lives, to offload a view of it would free nothing
            return False
        if numel <= MAX_STATISTICS and tensor.dim() <= 1 and may_be_statistics(tensor):
            return False
        if tensor.layout is not torch.strided or tensor.is_nested:
            return False
        if tensor.device != self.device:
            self.elsewhere = tensor.device
            return False
        is_flagged = tensor.dtype in FLAGGED_DTYPES and (tensor.is_quantized or tensor.is_conj())
        if is_flagged or tensor.is_neg() or tensor._is_zerotensor():
            return False
        base = tensor._base
        if base is not None and isinstance(base, Parameter):
            self.residents.add(tensor)
            return False
        storages = self.residents
        return tensor.untyped_storage()._cdata not in storages.refs or tensor not in storages
