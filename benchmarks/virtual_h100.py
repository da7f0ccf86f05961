"""Steps of the cases of on_card.py on a virtual H100, with rates that were measured on a real one.

    row = virtual_step(CASES["gpt4096"], "ours", device_limit_bytes=None)
    row["step_ms"], row["peak_gib"]

Figures of a row
    step_ms      of a step
    busy_ms      of compute in it
    peak_gib     of the device
    copied_gib   to the host in a step
    back_gib     of it, what the engine copied to the device again
    again_gib    computed again by the engine
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from on_card import GIB, Case, Stage
from torch import Tensor, nn
from virtual_megatron import StreamedMemory, megatron_on

from pp_offload import OffloadConfig, use_backend
from pp_offload.simulate import Hardware, VirtualBackend

FACTS = Path(__file__).parent / "results/h100.json"
MEASURED = Hardware.from_file(FACTS)
"""An H100 80GB behind PCIe 5 (2026-11-27)."""

GROUPS = ("attn", "mlp")
SETTLED = 8
"""Steps until all is chosen, and one more."""

Row = dict[str, Any]


def virtual_step(
    case: Case,
    way: str,
    num_layers: int | None = None,
    groups: Sequence[str] = GROUPS,
    operator_times: Callable[..., float | None] | None = None,
    **options: Any,
) -> Row:
    """The figures of a step when all is chosen.

    Args:
        case: What is run.
        way: One of on_card.py, ``save_on_cpu``, ``megatron`` or ``waiting``.
        num_layers: How many layers go that way; None for all.
        groups: Which of their parts are groups.
        operator_times: Seconds of an operator, or None for what the rates say.
        options: Of ``OffloadConfig``.
    """
    backend = VirtualBackend(MEASURED, operator_times)
    backend.memory = StreamedMemory(MEASURED.workspace_bytes)
    config = OffloadConfig(min_offloaded_tensor_size=case.min_numel, **options)
    with ExitStack() as entered:
        manager = entered.enter_context(use_backend(backend, config=config))
        stage = Stage(case, backend.device)
        stage.num_chosen = case.layers if num_layers is None else num_layers
        stage.groups = groups
        if way == "save_on_cpu":
            for layer in stage.layers[: stage.num_chosen]:
                layer.forward = saved_on_cpu(layer.forward)
        if way in ("megatron", "waiting"):
            modules = nn.ModuleList(stage.layers)
            stage.interface = entered.enter_context(megatron_on(backend, modules))
            stage.wait = backend.synchronize if way == "waiting" else stage.wait
            way = "ours"
        for _ in range(SETTLED if way == "ours" else 2):
            begin_s, busy_s = backend.seconds, backend.compute.busy_s
            copied, before = backend.link.bytes_to_host, manager.statistics()
            backend.memory.take_peak()
            stage.step(way, nullcontext)
            stage.clear()
            backend.synchronize()
        moved = manager.statistics().since(before)
    return {
        "step_ms": (backend.seconds - begin_s) * 1e3,
        "busy_ms": (backend.compute.busy_s - busy_s) * 1e3,
        "peak_gib": backend.memory.peak_bytes / GIB,
        "copied_gib": (backend.link.bytes_to_host - copied) / GIB,
        "back_gib": moved.bytes_reloaded / GIB,
        "again_gib": moved.bytes_computed_again / GIB,
    }


def saved_on_cpu(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The same forward, whose saved tensors are on the host until backward."""

    def run(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return forward(x)

    return run
