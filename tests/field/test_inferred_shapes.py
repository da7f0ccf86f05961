"""F52: what a schedule runs to infer shapes leaves nothing alive, in any schedule."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import BACKENDS, make_backend
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from toy import assert_idle, make_model, same_bits

from pp_offload import OffloadConfig, PipelineOffloadManager, use_backend
from pp_offload.pipelining import attach

pytestmark = pytest.mark.field("F52")

CONFIG = OffloadConfig(min_offloaded_tensor_size=1)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Counted(nn.Module):
    """Counts the forwards of the module inside, those that infer shapes included."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.ones(()))
        self.outputs: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x * self.scale)
        self.outputs.append(weakref.ref(y))
        return y


def train(make: Any, groups: tuple[str, ...], device: torch.device, steps: int) -> list[Tensor]:
    """Losses and gradients."""
    model = Counted(make_model(groups=groups, device=str(device))).to(device)
    stage = PipelineStage(model, 0, 1, device)
    schedule = make(stage, 4, loss_fn=nn.functional.mse_loss)
    handle = attach(schedule) if groups else None
    found = []
    for number in range(steps):
        torch.manual_seed(number)
        x, target = torch.randn(8, 8).to(device), torch.randn(8, 8).to(device)
        losses: list[Tensor] = []
        schedule.step(x, target=target, losses=losses, return_outputs=False)
        found += [loss.detach() for loss in losses]
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        if handle is not None:
            stage.clear_runtime_states()
            del losses
            gc.collect()
            assert_idle(PipelineOffloadManager.get_instance())
            assert not [ref for ref in model.outputs if ref() is not None]
    assert len(model.outputs) > 4 * steps, "shapes were inferred by a forward"
    if handle is not None:
        handle.detach()
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("make", [ScheduleGPipe, Schedule1F1B])
def test_nothing_alive_after_a_step(kind: str, make: Any, one_rank: None) -> None:
    with use_backend(make_backend(kind), config=CONFIG) as manager:
        device = manager.backend.device
        expected = train(make, (), device, 3)
        assert same_bits(train(make, ("mix", "mlp"), device, 3), expected)
        assert manager.statistics().bytes_offloaded > 0
