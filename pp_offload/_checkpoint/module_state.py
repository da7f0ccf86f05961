"""Buffers, modes and parameters of modules, restored for a forward that runs a second time.

Batch norm counts, spectral norm iterates, a router moves its bias: a second run of such a forward
would start from the buffers that the first run left, and change them again.

    before = ModuleState([module])   # ahead of the first run
    with before.restored():          # around every later run
        module(x)

NOTE [ Changed without a trace ]
    Batch norm changes its statistics without counting versions, and a codebook may be changed
    through ``.data``. So buffers that are small, of one dimension, or floating-point and part of
    the state dict are copied. Other buffers, such as a large mask, are not: if the second run finds
    a changed version, that is an error.

NOTE [ Other attributes ]
    Plain attributes are not restored, as under PyTorch's checkpoints. They may describe a buffer,
    such as the length of a table that grows. So if a module's plain attributes, but for
    ``training``, differ from before the first run, it keeps its current buffers in the second run,
    as copies, so that they change once.

NOTE [ Exchanged parameters ]
    ``torch.func.functional_call`` puts other tensors in the places of parameters for a forward, and
    backward comes later. So a second run computes with the tensors of the first. References are
    weak: tensors of a layer that waits on the host leave the device between the runs. The tensors
    that such a layer computes with share the ``__dict__`` of its parameters, and count as the same.
    Wrapper subclasses are left alone: FSDP exchanges its own for both runs.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter, RReLU

from pp_offload._common.torch_private import is_traceable_wrapper_subclass
from pp_offload._memory.addresses import has_storage
from pp_offload.errors import OffloadError

# Largest buffer that is always copied. See NOTE [ Changed without a trace ].
SMALL_BYTES = 2**16
# Kinds of attributes to compare. See NOTE [ Other attributes ].
PLAIN = {bool, int, float, complex, str, torch.dtype, torch.device, torch.Size}

Buffers = dict[str, Tensor | None]  # of a module, by name
Copies = dict[int, Any]  # memo of copy.deepcopy(): copies share memory where their originals do


class ModuleState:
    """State at construction of modules and all their parts, which they may share."""

    def __init__(self, modules: Iterable[Module]) -> None:
        parts = dict.fromkeys(part for module in modules for part in module.modules())
        copies: Copies = {}
        self._parts = [_PartState(part, copies) for part in parts]
        # Whether an operator inside draws noise after it has saved the noise's memory. A second run
        # that stops once all is saved would stop too early (pytorch/pytorch#193671).
        self.draws_after_saving = any(isinstance(part, RReLU) for part in parts)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the modules' state of the first run inside, and the current state afterwards.
        Raise an OffloadError if a large buffer was changed, or an exchanged parameter is gone.
        """
        copies: Copies = {}
        then = [
            (part.module, part.is_training, part.buffers_again(copies), part.parameters_again())
            for part in self._parts
        ]
        now = [
            (m, m.training, dict(m._buffers), {name: m._parameters[name] for name in exchanged})
            for m, _, _, exchanged in then
        ]
        try:
            for state in then:
                _put(*state)
            yield
        finally:
            for state in now:
                _put(*state)


class _PartState:
    """State of a module, without its parts, at the first run."""

    def __init__(self, module: Module, copies: Copies) -> None:
        self.module, self.is_training = module, module.training
        self._attributes = _attributes(module)
        self._versions = {
            name: _version(buffer)
            for name, buffer in module._buffers.items()
            if buffer is not None and _is_traced(module, name, buffer)
        }
        self._buffers = self._with_copies(module._buffers, copies)
        self._parameters = {
            name: (weakref.ref(tensor), vars(tensor))
            for name, tensor in module._parameters.items()
            if tensor is not None and not is_traceable_wrapper_subclass(tensor)
        }

    def buffers_again(self, copies: Copies) -> Buffers:
        """Return buffers for a second run, which may change them."""
        if _attributes(self.module) != self._attributes:
            return {name: _copied(b, copies) for name, b in self.module._buffers.items()}
        for name, version in self._versions.items():
            if _version(self._buffers[name]) != version:
                raise OffloadError(
                    f"buffer {name!r} of a {type(self.module).__name__} was changed in place "
                    "between a checkpoint's forward and its backward, which runs that again; "
                    f"assign a new tensor to self.{name}"
                )
        return self._with_copies(self._buffers, copies)

    def _with_copies(self, buffers: Buffers, copies: Copies) -> Buffers:
        return {
            name: buffer if name in self._versions else _copied(buffer, copies)
            for name, buffer in buffers.items()
        }

    def parameters_again(self) -> dict[str, Parameter | None]:
        """Return tensors of the first run that no longer stand in the places of parameters."""
        exchanged: dict[str, Parameter | None] = {}
        for name, (reference, attributes) in self._parameters.items():
            now, then = self.module._parameters.get(name), reference()
            if now is None or now is then or vars(now) is attributes:
                continue
            if then is None:
                raise OffloadError(
                    f"parameter {name!r} of a {type(self.module).__name__} is another tensor than "
                    "in the forward of a checkpoint, which is gone; keep the tensors that "
                    "torch.func.functional_call is given until backward"
                )
            exchanged[name] = then
        return exchanged


def _copied(buffer: Tensor | None, copies: Copies) -> Tensor | None:
    if buffer is None:
        return None
    return copy.deepcopy(buffer.detach(), copies).requires_grad_(buffer.requires_grad)


def _put(
    module: Module, is_training: bool, buffers: Buffers, parameters: dict[str, Parameter | None]
) -> None:
    if module.training != is_training:
        module.training = is_training
    module._buffers.clear()  # in the order of the state dict
    module._buffers.update(buffers)
    module._parameters.update(parameters)


def _attributes(module: Module) -> dict[str, Any]:
    named = vars(module).items()
    return {name: value for name, value in named if type(value) in PLAIN and name != "training"}


def _version(tensor: Tensor | None) -> int:
    """Return the number of changes in place; 0 for an inference tensor, which counts none."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _is_traced(module: Module, name: str, buffer: Tensor) -> bool:
    """Whether the buffer's version shows changes. See NOTE [ Changed without a trace ]."""
    if not has_storage(buffer) or buffer.nbytes <= SMALL_BYTES or buffer.dim() <= 1:
        return False
    is_state = name not in module._non_persistent_buffers_set
    return not (is_state and (buffer.is_floating_point() or buffer.is_complex()))
