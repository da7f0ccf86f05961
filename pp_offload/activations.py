"""Offload of all activations of a model on a device, without marked groups."""

from __future__ import annotations

from pp_offload._activations.context import NoOpManager, OffloadActivations
from pp_offload._activations.output_head import (
    get_act_offloading_ctx_manager,
    get_lora_act_offloading_ctx_manager,
)
from pp_offload._checkpoint.hidden_states import OffloadHiddenStates

__all__ = [
    "NoOpManager",
    "OffloadActivations",
    "OffloadHiddenStates",
    "get_act_offloading_ctx_manager",
    "get_lora_act_offloading_ctx_manager",
]
