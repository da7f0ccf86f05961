"""F15: validation between iterations, of any length, changes neither bytes nor numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import BACKENDS, make_backend
from field_checks import Chain, make_inputs, run_moves, schedule
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from toy import assert_idle, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, PipelineOffloadManager, use_backend
from pp_offload.pipelining import attach

pytestmark = pytest.mark.field("F15")

CONFIG = OffloadConfig(device_limit_bytes=None, min_offloaded_tensor_size=1)
COUNTS = {"fewer": 2, "equal": 4, "more": 7}


class Stop(RuntimeError):
    """What goes wrong in the middle of a validation."""


def failing(module: nn.Module, after: int) -> AbstractContextManager[object]:
    """Inside, the forward of ``module`` raises after so many calls."""
    calls: list[object] = []

    def count(*args: object) -> None:
        calls.append(None)
        if len(calls) > after:
            raise Stop

    return module.register_forward_pre_hook(count)


# By hand


def validate(model: Chain, num: int, fails_after: int = 99, is_step: bool = True) -> None:
    """``num`` microbatches without grad."""
    if is_step:
        off_interface.reset()
    model.eval()
    inputs = make_inputs(num, step=9, length=7, device=model.weights[0].device)
    with torch.no_grad(), failing(model, fails_after), suppress(Stop):
        for x in inputs:
            off_interface.init_chunk_handler(None, None, 1)
            model(x)
    model.train()


def bytes_by_step(kind: str, between: Callable[[Chain], None]) -> list[int]:
    """What each of four training steps offloads; ``between`` runs after the second and third."""
    moved = [0]
    with use_backend(make_backend(kind), config=CONFIG) as manager:
        device = manager.backend.device
        on, off = (Chain(("a", "b"), 2, is_on=b, device=device) for b in (True, False))
        for step in range(4):
            if step >= 2:
                before = manager.statistics()
                between(on)
                assert manager.statistics().bytes_offloaded == before.bytes_offloaded
                assert manager.statistics().bytes_reloaded == before.bytes_reloaded
            inputs = make_inputs(4, step=step, device=device)
            expected = run_moves([off], inputs, schedule(4, 2), False)
            assert same_bits(run_moves([on], inputs, schedule(4, 2), True), expected), step
            assert_idle(manager)
            moved.append(manager.statistics().bytes_offloaded)
    return [after - before for before, after in zip(moved, moved[1:], strict=False)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("is_step", [True, False], ids=["own step", "same step"])
def test_without_grad(kind: str, is_step: bool) -> None:
    expected = bytes_by_step(kind, lambda model: None)
    assert expected[0] > expected[1] == expected[2] == expected[3] > 0
    for num in COUNTS.values():
        assert bytes_by_step(kind, partial(validate, num=num, is_step=is_step)) == expected
    raises = partial(validate, num=4, fails_after=2, is_step=is_step)
    assert bytes_by_step(kind, raises) == expected


# With a schedule


@pytest.fixture
def model(manager: PipelineOffloadManager) -> Iterator[nn.Module]:
    """The only stage of a pipeline of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    generator = torch.Generator().manual_seed(2)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    yield layers.to(manager.backend.device)
    dist.destroy_process_group()


def pipeline(kind: Any, model: nn.Module, num_microbatches: int) -> Any:
    device = next(model.parameters()).device
    return kind(PipelineStage(model, 0, 1, device), num_microbatches, loss_fn=nn.MSELoss())


def data(model: nn.Module, num_microbatches: int) -> Tensor:
    x = torch.linspace(-1, 1, 16 * num_microbatches).view(2 * num_microbatches, 8)
    return x.to(next(model.parameters()).device)


def train(schedule: Any, model: nn.Module) -> list[Tensor]:
    """The losses and gradients of one step."""
    losses: list[Tensor] = []
    model.zero_grad()
    schedule.step(data(model, 4), target=data(model, 4).flip(0), losses=losses)
    return [t.detach().clone() for t in (*losses, *(p.grad for p in model.parameters()))]


def evaluate(schedule: Any, model: nn.Module, num: int, *, raises: bool) -> None:
    """Forward only, with losses."""
    target = data(model, num)
    if not raises:
        schedule.eval(data(model, num), target=target, losses=[])
        return
    with failing(model[1], 2), pytest.raises(RuntimeError):
        schedule.eval(data(model, num), target=target, losses=[])
    schedule._internal_losses.clear()  # which torch would add to those of the next step


@pytest.mark.covering(2)
@pytest.mark.parametrize("is_attached", [True, False], ids=["attached", "not attached"])
@pytest.mark.parametrize("has_grad", [True, False], ids=["grad enabled", "no_grad"])
@pytest.mark.parametrize("length", [*COUNTS, "raises"])
def test_schedule_eval(
    manager: PipelineOffloadManager,
    model: nn.Module,
    length: str,
    has_grad: bool,
    is_attached: bool,
) -> None:
    """Validation by the training schedule, or by one of its own for another length."""
    trains = pipeline(Schedule1F1B, model, 4)
    num = COUNTS.get(length, 4)
    evaluates = trains if num == 4 else pipeline(ScheduleGPipe, model, num)
    is_apart = is_attached and evaluates is not trains
    expected, moved = train(trains, model), []
    with attach(trains, {"layer": "*"}, CONFIG), attach(evaluates) if is_apart else nullcontext():
        for step in range(5):
            before = manager.statistics().bytes_offloaded
            assert same_bits(train(trains, model), expected), step
            after = manager.statistics().bytes_offloaded
            moved.append(after - before)
            if step in (1, 2):
                with torch.set_grad_enabled(has_grad):
                    evaluate(evaluates, model, num, raises=length == "raises")
                assert manager.statistics().bytes_offloaded == after
                assert_idle(manager)
    assert moved[0] > 0 and len(set(moved[1:])) == 1 and moved[1] > 0
