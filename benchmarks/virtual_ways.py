"""Ways in which a microbatch goes through a stage on a virtual device: ours, and those of peers.

with interface_of(way, stage, backend) as interface:
    forward = forward_of(way, stage, backend, interface)
    interface.reset()
    interface.init_chunk_handler(None, None, 2**20)
    y = forward(stage.microbatch())
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import virtual_megatron
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from virtual_models import Stage

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig
from pp_offload.checkpointing import (
    ActivationCheckpointing,
    ActivationCheckpointingVariants,
    FullACParams,
)
from pp_offload.simulate import VirtualBackend

HOST_BYTES = 2**42
"""More than any row needs: what this machine has free is no matter."""

PEERS = ("save_on_cpu", "recompute", "inputs")
"""Those that are always there."""

MARKED = ("ours", "megatron")
"""Those for which the stage marks its groups."""

Forward = Callable[[Tensor], Tensor]


def peers() -> tuple[str, ...]:
    """All that can run here."""
    return PEERS if virtual_megatron.why_not() else (*PEERS, "megatron")


def interface_of(way: str, stage: Stage, backend: VirtualBackend) -> AbstractContextManager[Any]:
    """To steps, microbatches and groups: ours, or that of a peer that has its own."""
    if way == "megatron":
        return virtual_megatron.megatron_on(backend, stage)
    return nullcontext(off_interface)


def forward_of(way: str, stage: Stage, backend: VirtualBackend, interface: Any) -> Forward:
    """How a microbatch goes through the stage."""
    if way == "save_on_cpu":
        return partial(_under, partial(torch.autograd.graph.save_on_cpu, pin_memory=True), stage)
    if way == "recompute":
        return partial(_recomputed, stage)
    if way == "inputs":
        ActivationCheckpointing.apply_activation_checkpointing_(
            ActivationCheckpointingVariants.FULL_ACTIVATION_CHECKPOINTING,
            layers_fqn="layers",
            model=stage,
            ac_fun_params=FullACParams(
                offload_inputs=True,
                config=OffloadConfig(
                    device_limit_bytes=None, host_budget_bytes=HOST_BYTES, rematerialize="none"
                ),
            ),
            backend=backend,
        )
    return partial(stage, offload=way in MARKED, interface=interface)


def _under(context: Callable[[], Any], stage: Stage, x: Tensor) -> Tensor:
    with context():
        return stage(x)


def _recomputed(stage: Stage, x: Tensor) -> Tensor:
    for layer in stage.layers:
        x = checkpoint(layer, x, use_reentrant=False)
    return x
