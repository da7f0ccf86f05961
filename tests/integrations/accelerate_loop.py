"""A loop with an ``Accelerator``, as its users write it, without and with offload."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from small_blocks import Blocks, batches
from torch import Tensor, nn

Make = Callable[[Accelerator, nn.Module], Any]
"""Makes an offload of what was prepared."""


def make_accelerator(**options: Any) -> Accelerator:
    """A fresh one, whatever was made before; the process group stays."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)


def train(
    make: Make | None, *, wrap: Callable[[nn.Module], nn.Module] = nn.Module.train, **options: Any
) -> tuple[list[Tensor], Any]:
    """Two epochs with an evaluation after each; losses, gradients and parameters; the offload."""
    accelerator = make_accelerator(**options)
    model = wrap(Blocks())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, data = accelerator.prepare(model, optimizer, batches(9))
    offload = nullcontext() if make is None else make(accelerator, model)
    torch.manual_seed(17)
    seen: list[Tensor] = []
    for _ in range(2):
        model.train()
        for x, target in data:
            with accelerator.accumulate(model):
                with offload:
                    loss = nn.functional.cross_entropy(model(x), target)
                accelerator.backward(loss)
                seen.append(loss.detach())
                if accelerator.sync_gradients:
                    seen += [p.grad.clone() for p in model.parameters()]
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad(), offload:
            seen.append(model(x))
    return [*seen, *(p.detach().clone() for p in model.parameters())], offload
