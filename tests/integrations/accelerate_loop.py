"""A loop with an ``Accelerator``, as its users write it, without and with offload."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from small_blocks import WIDTH, Blocks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Make = Callable[[Accelerator, nn.Module], Any]
"""Makes an offload of what was prepared; or a context that does nothing."""


def make_accelerator(**options: Any) -> Accelerator:
    """A fresh one, whatever was made before; the process group stays."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)


def loader(num: int) -> DataLoader:
    drawn = torch.Generator().manual_seed(5)
    x = torch.randn(num * 4, WIDTH, generator=drawn)
    target = torch.randint(4, (num * 4,), generator=drawn)
    return DataLoader(TensorDataset(x, target), batch_size=4)


def nothing(accelerator: Accelerator, model: nn.Module) -> AbstractContextManager[None]:
    return nullcontext()


def train(make: Make, *, num: int = 9, **options: Any) -> tuple[list[Tensor], Any]:
    """Two epochs with an evaluation after each; losses, gradients and parameters; the offload."""
    accelerator = make_accelerator(**options)
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, data = accelerator.prepare(model, optimizer, loader(num))
    offload = make(accelerator, model)
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
