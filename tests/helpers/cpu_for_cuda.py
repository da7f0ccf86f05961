"""Lets Megatron-Core train on the CPU: what it asks of ``torch.cuda`` is answered by the CPU.

Only the names are here that its GPT model, its layers in plain PyTorch and its schedules use. They
are replaced for the rest of the process, before Megatron is imported and after.

    before_megatron()
    import megatron.core
    after_megatron()
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def before_megatron() -> None:
    """Replace what Megatron looks up in torch."""
    made = torch.zeros

    def zeros(*size: Any, device: Any = None, **options: Any) -> Tensor:
        return made(*size, device="cpu" if device == "cuda" else device, **options)

    def nothing(*args: Any) -> None:
        return None

    stand_ins: list[tuple[Any, str, Any]] = [
        # Where new tensors are made: what is received from another rank, and a causal mask.
        (torch.cuda, "current_device", lambda: "cpu"),
        # The schedules count tokens on "cuda", by name.
        (torch, "zeros", zeros),
        # After a batch of sends and receives.
        (torch.cuda, "synchronize", nothing),
        # The generators of dropout are forked from the device's.
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "get_rng_state", lambda *args, **options: torch.get_rng_state()),
        (torch.cuda, "set_rng_state", lambda state, *args, **options: torch.set_rng_state(state)),
    ]
    for owner, name, stand_in in stand_ins:
        setattr(owner, name, stand_in)


def after_megatron() -> None:
    """Replace what Megatron itself has for the generator of a device, and has not without CUDA."""
    from megatron.core.tensor_parallel import random

    def get_state(*args: Any, **options: Any) -> Tensor:
        return torch.get_rng_state()

    def set_state(state: Tensor, *args: Any, **options: Any) -> None:
        torch.set_rng_state(state)

    # Its checkpoints ask for these of Transformer Engine, whether or not it is there.
    random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
    random.activation_recompute_forward = lambda **options: nullcontext()
    random.fp8_autocast = lambda **options: nullcontext()
    random._get_cuda_rng_state = get_state
    random._set_cuda_rng_state = set_state
    # It says each time that the CPU's generator has changed, which is the device's here.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)
