"""Megatron-Core's own module for activation offload, on a virtual device.

The module runs as it is, where it is installed. Streams, events, pinned memory and
``record_stream`` of ``torch.cuda`` are the virtual device's (``virtual_cuda``); what else is
replaced is in ``megatron_on``, with the reasons.

    with megatron_on(backend, stage) as off_interface:   # Megatron's own
        off_interface.init_chunk_handler(None, None, 2**20)
        with off_interface(True, x, "mlp") as x:
            y = mlp(x)
        y = off_interface.group_commit(y, name="mlp")
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from pp_offload.simulate import VirtualBackend
from pp_offload.simulate.clocks import VirtualEvent, VirtualStream
from pp_offload.simulate.device import Allocation, DeviceMemory

MODULE = "megatron.core.pipeline_parallel.fine_grained_activation_offload"
TRANSFORMER_ENGINE = "megatron.core.extensions.transformer_engine"


class CudaEvent(VirtualEvent):
    """An event that is made first and recorded later. Until then it has passed, as on CUDA.

    Args:
        backend: Its current stream records where no other is given.
    """

    __slots__ = ("_backend",)

    def __init__(self, backend: VirtualBackend) -> None:
        super().__init__(backend.host, 0.0)
        self._backend = backend

    def record(self, stream: VirtualStream | None = None) -> None:
        """Move it behind all that the stream has now. Earlier waits for it do not change."""
        self.time_s = (stream or self._backend.current_stream()).record_event().time_s


class StreamedMemory(DeviceMemory):
    """Device memory whose tensors other streams may use, as a caching allocator has it.

    When a tensor is gone, an event is recorded on each stream that uses it, behind all that was
    launched there. When the host next allocates, memory whose events have passed is free.
    """

    def __init__(self, taken_bytes: int) -> None:
        super().__init__(taken_bytes)
        self._streams: dict[int, set[VirtualStream]] = {}
        self._in_use: list[tuple[VirtualEvent, Allocation]] = []

    def record_stream(self, tensor: Tensor, stream: VirtualStream) -> None:
        """Mark a tensor as used by another stream."""
        self._streams.setdefault(id(self.see(tensor.untyped_storage())), set()).add(stream)

    def dies(self, allocation: Allocation) -> None:
        """Free the memory, or record the last of the events of its streams."""
        streams = self._streams.pop(id(allocation), ())
        if streams:  # recorded now: what is launched later is not waited for
            events = (stream.record_event() for stream in streams)
            self._in_use.append((max(events, key=lambda event: event.time_s), allocation))
        else:
            super().dies(allocation)

    def _free_gone(self) -> None:
        for event, allocation in self._in_use:
            if event.query():
                super().dies(allocation)
        self._in_use = [each for each in self._in_use if not each[0].query()]
        super()._free_gone()


def virtual_cuda(backend: VirtualBackend) -> list[tuple[Any, str, Any]]:
    """What answers in place of ``torch.cuda``: owner, name of its attribute, stand-in."""
    make_empty, pinned_tensors = torch.empty, WeakIdKeyDictionary()

    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        tensor = make_empty(*size, **options)
        if pin_memory:
            pinned_tensors[tensor] = True
        return tensor

    def record_stream(tensor: Tensor, stream: VirtualStream) -> None:
        backend.memory.record_stream(tensor, stream)

    return [
        # Each new stream is ordered with nothing, and has a clock.
        (torch.cuda, "Stream", lambda: backend.new_stream()),
        (torch.cuda, "Event", lambda: CudaEvent(backend)),
        # Operators and copies take time on the current stream.
        (torch.cuda, "current_stream", lambda: backend.current_stream()),
        (torch.cuda, "stream", backend.stream),
        (torch.cuda, "synchronize", backend.synchronize),
        # Without CUDA they raise errors.
        (torch.cuda.nvtx, "range_push", lambda *args: None),
        (torch.cuda.nvtx, "range_pop", lambda *args: None),
        # Without CUDA nothing can be pinned, and the host would wait for every copy back.
        (torch, "empty", empty),
        (Tensor, "is_pinned", lambda tensor: tensor in pinned_tensors),
        # It takes no stream that is not CUDA's. It decides when memory is free: see StreamedMemory.
        (Tensor, "record_stream", record_stream),
    ]


@cache
def modules() -> tuple[ModuleType, ModuleType] | None:
    """The module, and a flag's; None where it cannot run. Importing them takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of all that is not installed, and not used here
        try:
            return importlib.import_module(MODULE), importlib.import_module(TRANSFORMER_ENGINE)
        except Exception:  # what it imports may not go with this torch
            return None


@contextmanager
def megatron_on(backend: VirtualBackend, model: nn.Module) -> Iterator[Any]:
    """The module's interface, with a new manager whose streams are those of the device.

    Args:
        backend: Must be active, and its memory a ``StreamedMemory``.
        model: Its parameters stay on the device, as a user's do.
    """
    module, engine = modules()
    manager, chunk = module.PipelineOffloadManager, module.ChunkOffloadHandler
    wants = chunk.tensor_need_offloading_checker
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def wants_activation(self: Any, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata not in parameters and wants(self, tensor)

    stand_ins = [
        # Its users mark parameters as not to be offloaded, and their layers save these tensors.
        # PyTorch's layers save views of them, which have no mark.
        (chunk, "tensor_need_offloading_checker", wants_activation),
        # It refuses to work without Transformer Engine, and uses nothing but a flag of it.
        (engine, "cpu_offload", SimpleNamespace(CPUOffloadEnabled=False)),
        # It gathers the first step's bytes from all ranks, and prints them. There are no ranks.
        (module, "print_offload_summary_table", lambda total_offload_bytes: None),
        # Its manager belongs to the process, and is made at the first use.
        (manager, "OFFLOAD_MGR", None),
    ]
    with ExitStack() as entered:
        for owner, name, stand_in in [*virtual_cuda(backend), *stand_ins]:
            entered.enter_context(patch.object(owner, name, stand_in))
        yield module.FineGrainedActivationOffloadingInterface
