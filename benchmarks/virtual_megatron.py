"""Megatron-Core's own module for activation offload, on a virtual device.

It runs as it is, where it is installed. What it asks of ``torch.cuda`` is answered by
``virtual_cuda.py``; what is replaced of its own is below, with the reason.

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

from torch import Tensor, nn
from virtual_cuda import virtual_cuda

from pp_offload.simulate import VirtualBackend

MODULE = "megatron.core.pipeline_parallel.fine_grained_activation_offload"
TRANSFORMER_ENGINE = "megatron.core.extensions.transformer_engine"


@cache
def why_not() -> str | None:
    """Why it cannot run here; None if it can. Asking imports it, which takes seconds."""
    try:
        _modules()
    except Exception as failure:  # what it imports may not go with this torch
        return f"{type(failure).__name__}: {failure}"
    return None


def _modules() -> tuple[ModuleType, ModuleType]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of all that is not installed, and not used here
        return importlib.import_module(MODULE), importlib.import_module(TRANSFORMER_ENGINE)


@contextmanager
def megatron_on(backend: VirtualBackend, model: nn.Module) -> Iterator[Any]:
    """Its interface, with a new manager whose streams are those of the device.

    Args:
        backend: Has to be active.
        model: Its parameters stay on the device, as a user's do.
    """
    module, engine = _modules()
    manager, chunk = module.PipelineOffloadManager, module.ChunkOffloadHandler
    wants = chunk.tensor_need_offloading_checker
    parameters = {one.untyped_storage()._cdata for one in model.parameters()}

    def wants_activation(self: Any, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata not in parameters and wants(self, tensor)

    patches = [
        # Its users mark parameters as not to be offloaded, and their layers save these tensors.
        # PyTorch's save views of them, which have no mark.
        (chunk, "tensor_need_offloading_checker", wants_activation),
        # It refuses to work without Transformer Engine, and uses nothing but a flag of it.
        (engine, "cpu_offload", SimpleNamespace(CPUOffloadEnabled=False)),
        # It gathers the first step's bytes from all ranks, and prints them. There are no ranks.
        (module, "print_offload_summary_table", lambda total_offload_bytes: None),
        # Its manager belongs to the process, and is made when first asked for.
        (manager, "OFFLOAD_MGR", None),
    ]
    with virtual_cuda(backend), ExitStack() as entered:
        for owner, name, stand_in in patches:
            entered.enter_context(patch.object(owner, name, stand_in))
        yield module.FineGrainedActivationOffloadingInterface
