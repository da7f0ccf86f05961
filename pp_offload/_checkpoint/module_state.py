"""Buffers, modes and parameters of modules, for a forward that runs again and must change nothing.

Batch norm counts, spectral norm iterates, a router moves its bias: a second run of such a forward
would start from what the first run left, and change it again.

    before = ModuleState([module])   # ahead of the first run
    with before.restored():          # around every later run
        module(x)

NOTE [ Changed without a trace ]
    Batch norm changes its statistics without their version counters telling, and a codebook may be
    changed through ``.data``. So buffers that are small, of one dimension, or floating-point and
    part of the state dict are copied. Any other buffer, such as a large mask, is not: if its
    version says in the second run that it was changed, that is an error.

NOTE [ Other attributes ]
    Plain attributes are not restored. They may say what is in a buffer, such as the length of a
    table that grows, so a module whose attributes, parameters or parts are others than before the
    first run keeps its present buffers in the second run, as under PyTorch's checkpoints. That run
    gets copies of them, so that they change once. A lazy module that the first run initializes is
    one of these.

NOTE [ Exchanged parameters ]
    ``torch.func.functional_call`` puts other tensors in the places of parameters for a forward, and
    backward comes later. So a second run computes with the tensors of the first. They are held
    weakly: those of a layer that waits on the host leave the device between the runs. What that
    layer computes with has the ``__dict__`` of its parameter, and so is the same parameter. Wrapper
    subclasses are left alone: FSDP exchanges its own for both runs.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, RReLU
from torch.nn.modules.lazy import LazyModuleMixin

from pp_offload._common.torch_private import is_traceable_wrapper_subclass
from pp_offload._memory.storages import has_storage
from pp_offload.errors import OffloadError

SMALL_BYTES = 2**16
"""Up to here any buffer is copied. See NOTE [ Changed without a trace ]."""

PLAIN = {bool, int, float, complex, str, torch.dtype, torch.device, torch.Size}
"""Kinds of attributes that are compared. See NOTE [ Other attributes ]."""

Buffers = Mapping[str, Tensor | None]
"""Of one module, by name."""


@dataclass(frozen=True)
class ParameterState:
    """A parameter at the first run. See NOTE [ Exchanged parameters ]."""

    name: str
    """In its module."""

    tensor: weakref.ref[Tensor]
    """What stood there."""

    attributes: dict[str, Any]
    """The ``__dict__`` of that tensor."""

    def restored(self, module: Module) -> Tensor | None:
        """What a second run computes with; None where that stands there.

        Raises:
            OffloadError: The tensor of the first run is gone.
        """
        now, then = module._parameters.get(self.name), self.tensor()
        if now is None or now is then or is_traceable_wrapper_subclass(now):
            return None
        if vars(now) is self.attributes:
            return None
        if then is None:
            raise OffloadError(
                f"parameter {self.name!r} of a {type(module).__name__} is another tensor than in "
                "the forward of a checkpoint, which is gone, so backward cannot run the "
                "checkpoint again; expected it to be alive until backward; keep the tensors that "
                "torch.func.functional_call is given"
            )
        return then


@dataclass(frozen=True)
class PartState:
    """One module without its parts, at the first run."""

    module: Module
    is_training: bool
    attributes: Any
    """What may say what is in the buffers. See NOTE [ Other attributes ]."""

    buffers: Buffers
    """The buffers, or copies of those that may change without a trace."""

    versions: Mapping[str, int]
    """Of the buffers that are no copies."""

    parameters: Sequence[ParameterState] = ()

    def restored(self, copies: _Copies) -> Buffers:
        """Buffers for a second run.

        Raises:
            OffloadError: A large buffer was changed in place.
        """
        if _attributes(self.module) != self.attributes:
            return copies.of_all(dict(self.module._buffers.items()))
        for name, version in self.versions.items():
            if _version(self.buffers[name]) != version:
                raise OffloadError(
                    f"buffer {name!r} of a {type(self.module).__name__} was changed in place "
                    "between a checkpoint's forward and its backward, which runs that again; "
                    f"expected a large buffer to stay as it is; assign a new tensor to self.{name}"
                )
        return copies.of_all(self.buffers, self.versions)


class ModuleState:
    """The state of modules and all their parts when this is made.

    Args:
        modules: May share parts.
    """

    def __init__(self, modules: Iterable[Module]) -> None:
        parts = {id(part): part for module in modules for part in module.modules()}.values()
        copies = _Copies(buffer for part in parts for buffer in part._buffers.values())
        self._parts = [_state(part, copies) for part in parts]

    @property
    def draws_after_saving(self) -> bool:
        """Whether an operator inside draws its noise when it has saved the memory for it. A second
        run that stops when all is saved would stop before (pytorch/pytorch#193671).
        """
        return any(isinstance(part.module, RReLU) for part in self._parts)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, the modules have what they had then; afterwards, the present ones."""
        modules = [part.module for part in self._parts]
        now = [(module.training, dict(module._buffers.items())) for module in modules]
        tables = [*(part.buffers for part in self._parts), *(buffers for _, buffers in now)]
        copies = _Copies(buffer for table in tables for buffer in table.values())
        then = [(part.is_training, part.restored(copies)) for part in self._parts]
        parameters: list[tuple[dict[str, Any], str, Tensor]] = [
            (part.module._parameters, state.name, tensor)
            for part in self._parts
            for state in part.parameters
            if (tensor := state.restored(part.module)) is not None
        ]
        present = [(table, name, table[name]) for table, name, _ in parameters]
        try:
            for module, state in zip(modules, then, strict=True):
                _put(module, *state)
            for table, name, tensor in parameters:
                table[name] = tensor
            yield
        finally:
            for table, name, tensor in present:
                table[name] = tensor
            for module, state in zip(modules, now, strict=True):
                _put(module, *state)


class _Copies:
    """Copies of ``tensors``; those that share memory share it in their copies, too."""

    def __init__(self, tensors: Iterable[Tensor | None]) -> None:
        distinct = {id(tensor): tensor for tensor in tensors if tensor is not None}
        self._num_on_storage = Counter(map(_storage_key, distinct.values()))
        self._memo: dict[int, Any] = {}

    def of_all(self, buffers: Buffers, but: Iterable[str] = ()) -> Buffers:
        """Copies of buffers, and those named in ``but`` themselves."""
        return {
            name: buffer if buffer is None or name in but else self._of(buffer)
            for name, buffer in buffers.items()
        }

    def _of(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._memo:
            is_shared = self._num_on_storage[_storage_key(tensor)] > 1
            plain = tensor.detach()
            made = copy.deepcopy(plain, self._memo) if is_shared else plain.clone()
            self._memo[id(tensor)] = made.requires_grad_(tensor.requires_grad)
        return self._memo[id(tensor)]


def _state(part: Module, copies: _Copies) -> PartState:
    if isinstance(part, LazyModuleMixin) and part.has_uninitialized_params():
        return PartState(part, part.training, None, {}, {})  # see NOTE [ Other attributes ]
    buffers = dict(part._buffers.items())
    versions = {
        name: _version(buffer)
        for name, buffer in buffers.items()
        if buffer is not None and _is_traced(buffer, name not in part._non_persistent_buffers_set)
    }
    parameters = [
        ParameterState(name, weakref.ref(tensor), vars(tensor))
        for name, tensor in part._parameters.items()
        if tensor is not None and not is_traceable_wrapper_subclass(tensor)
    ]
    attributes = _attributes(part)
    buffers_then = copies.of_all(buffers, versions)
    return PartState(part, part.training, attributes, buffers_then, versions, parameters)


def _attributes(module: Module) -> Any:
    plain = {name: value for name, value in vars(module).items() if type(value) in PLAIN}
    plain.pop("training", None)
    tables: tuple[Any, ...] = module._parameters, module._modules
    return plain, [[name for name, part in t.items() if part is not None] for t in tables]


def _put(module: Module, is_training: bool, buffers: Buffers) -> None:
    """Have this mode and these buffers in a module, in this order, and no others."""
    if module.training != is_training:
        module.training = is_training
    there = module._buffers
    if list(there.keys()) != list(buffers):
        there.clear()
    for name, buffer in buffers.items():
        there[name] = buffer


def _version(tensor: Tensor | None) -> int:
    """How often it was changed in place; 0 for a tensor of inference, which counts nothing."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _storage_key(tensor: Tensor) -> object:
    return tensor.untyped_storage()._cdata if has_storage(tensor) else id(tensor)


def _is_traced(buffer: Tensor, is_state: bool) -> bool:
    """Whether its version tells of changes. See NOTE [ Changed without a trace ]."""
    if not has_storage(buffer) or buffer.nbytes <= SMALL_BYTES or buffer.dim() <= 1:
        return False
    return not (is_state and (buffer.is_floating_point() or buffer.is_complex()))
