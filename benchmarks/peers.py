"""Other activation offloaders, where they are installed. None is required.

for name, context in installed_peers(min_numel):
    with context():
        y = layer(x)  # what autograd saves here is offloaded
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

Context = Callable[[], AbstractContextManager[Any]]

_CONTEXTS = {
    "trl": "trl.models.activation_offloading",
    "torchtune": "torchtune.training",
}
_MEGATRON = "megatron.core.pipeline_parallel.fine_grained_activation_offload"


def installed_peers(min_numel: int, *, use_streams: bool = False) -> list[tuple[str, Context]]:
    """Name and context of each peer that works here.

    Args:
        min_numel: Elements of the smallest tensor to offload.
        use_streams: Whether copies may overlap compute; needs an accelerator.
    """
    candidates = [
        (name, lambda module=module: _hugging(module, min_numel, use_streams))
        for name, module in _CONTEXTS.items()
    ]
    candidates.append(("megatron", lambda: _megatron(min_numel)))
    return [(name, context) for name, make in candidates if (context := _working(make))]


def _working(make: Callable[[], Context]) -> Context | None:
    # A peer that is missing, or that cannot run on this device, is left out.
    try:
        context = make()
        with context():
            torch.ones(1024, requires_grad=True).sin().cos().sum().backward()
    except Exception:
        return None
    return context


def _hugging(module: str, min_numel: int, use_streams: bool) -> Context:
    offload = importlib.import_module(module).OffloadActivations

    def context() -> AbstractContextManager[Any]:
        return offload(
            use_pin_memory=use_streams, use_streams=use_streams, min_offload_size=min_numel
        )

    return context


def _megatron(min_numel: int) -> Context:
    interface = importlib.import_module(_MEGATRON).FineGrainedActivationOffloadingInterface

    @contextmanager
    def context() -> Iterator[None]:
        interface.init_chunk_handler(1, 0, min_numel)
        with interface.get_context(True):
            yield

    return context
