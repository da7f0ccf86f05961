"""``attach`` on a schedule of one process: what it wraps, what it follows, what it restores."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from conftest import ACCELERATORS, BEFORE_2_13
from helpers.sessions import assert_idle, assert_no_hooks
from helpers.toy import num_hooks, same_bits
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from pp_offload import (
    OffloadConfig,
    OffloadError,
    PipelineOffloadManager,
    offload_modules,
    recompute_layers,
)
from pp_offload._common.offload_plan import OffloadPlan, RankPlan
from pp_offload._groups.plan import GroupBytes
from pp_offload.pipelining import attach, detach

pytestmark = pytest.mark.parametrize("backend", ["late", "random", *ACCELERATORS], indirect=True)

ALL = OffloadConfig(device_limit_bytes=None, min_offloaded_tensor_size=1)
"""Options with which all groups leave."""


def plan_of(*ranks: RankPlan, **made_with: Any) -> OffloadPlan:
    return OffloadPlan("a test", 0, 0.0, 0.0, ranks, made_with)


@pytest.fixture
def schedule(manager: PipelineOffloadManager, one_rank: None) -> Any:
    """1F1B over one stage in this process, four microbatches."""
    device = manager.backend.device
    torch.manual_seed(2)
    layers = ({"up": nn.Linear(8, 8), "tanh": nn.Tanh()} for _ in range(3))
    model = nn.Sequential(*(nn.Sequential(OrderedDict(layer)) for layer in layers))
    stage = PipelineStage(model.to(device), 0, 1, device)
    return Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)


def step(schedule: Any) -> list[Tensor]:
    """The losses of one step, and the gradients it added; those of a shared module, once."""
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    models = nn.ModuleList(stage.submod for stage in stages)
    x = torch.linspace(-1, 1, 64).view(8, 8).to(stages[0].device)
    losses: list[Tensor] = []
    models.zero_grad()
    schedule.step(x, target=x.flip(0), losses=losses)
    return losses + [p.grad.clone() for p in models.parameters() if p.grad is not None]


def test_only_forwards_that_have_a_backward_are_chunks(schedule: Any) -> None:
    """Not an evaluation, nor what runs between and behind the chunks of a step."""
    with attach(schedule, {"layer": "*"}, ALL) as handle:
        step(schedule)  # the first one runs the model to infer shapes
        manager, seen, between = handle.manager, [], []
        loss_fn = schedule._loss_fn

        def loss(*args: Any) -> Tensor:
            between.append(manager.cur_forward_chunk())
            return loss_fn(*args)

        schedule._loss_fn = loss
        hook = schedule._stage.submod.register_forward_pre_hook(
            lambda *args: seen.append(manager.cur_forward_chunk() is not None)
        )
        step(schedule)
        assert seen == [True] * 4 and between == [None] * 4
        x = torch.linspace(-1, 1, 64).view(8, 8).to(schedule._stage.device)
        schedule.eval(x, target=x, losses=[])
        hook.remove()
    assert len(seen) >= 8 and not any(seen[4:])


@pytest.mark.parametrize(
    "register", [nn.Module.register_forward_hook, nn.Module.register_full_backward_pre_hook]
)
def test_an_interrupted_step_leaves_no_hook(schedule: Any, register: Any) -> None:
    """PyTorch calls no hook at the end of such a forward."""
    expected = step(schedule)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with attach(schedule, {"layer": "*"}, ALL) as handle:
        step(schedule)
        failing = register(schedule._stage.submod[1][1], interrupt)
        with pytest.raises((KeyboardInterrupt, RuntimeError)), failing:  # of a backward
            step(schedule)
        assert handle.manager.cur_forward_chunk() is None
        assert_no_hooks()
        schedule._stage.clear_runtime_states()
        schedule._internal_losses.clear()  # PyTorch keeps those of a step that did not end
        assert same_bits(expected, step(schedule))
        assert_idle(handle.manager)


def another(schedule: Any) -> Any:
    """Over the same model."""
    stage = PipelineStage(schedule._stage.submod, 0, 1, schedule._stage.device)
    return Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)


@pytest.mark.parametrize(
    ("steps", "num"),
    [("train train", 0), ("train train train", 1), ("train " * 9, 1), ("train eval eval fail", 0)]
    + [("train marked train train", 0), ("off train train train", 0)],
)
def test_forgotten_groups_are_warned_of_once(
    schedule: Any, steps: str, num: int, caplog: pytest.LogCaptureFixture
) -> None:
    """When the step after the second begins. Evaluation and steps that raise do not count."""
    x, model = torch.zeros(8, 8, device=schedule._stage.device), schedule._stage.submod
    with attach(schedule) as handle:
        for each in steps.split():
            with ExitStack() as stack:
                if each == "off":
                    handle.manager.disable_offload()
                elif each == "marked":
                    stack.enter_context(offload_modules(model, {"layer": "*"}))
                elif each == "fail":
                    stack.enter_context(pytest.raises((ZeroDivisionError, RuntimeError)))
                    model[0].register_forward_hook(lambda *_: 1 / 0)
                schedule.eval(x, target=x, losses=[]) if each == "eval" else step(schedule)
    warned = [text for text in caplog.messages if "no group ran" in text and "groups=" in text]
    assert len(warned) == num


def test_two_schedules_share_a_manager(schedule: Any) -> None:
    other = another(schedule)
    expected = step(schedule)
    with attach(other, None, ALL) as first:
        with attach(schedule, {"layer": "*"}) as handle:
            for each in (schedule, other, schedule):
                assert same_bits(expected, step(each))
            assert handle.manager is first.manager
        moved = first.manager.statistics().bytes_offloaded
        assert moved > 0
        assert same_bits(expected, step(other))


def test_two_schedules_with_different_options_are_an_error(schedule: Any) -> None:
    other = another(schedule)
    with attach(schedule, {"layer": "*"}, ALL):
        options = OffloadConfig(device_limit_bytes=None, min_offloaded_tensor_size=2)
        differ = r"options( differ)?: min_offloaded_tensor_size is 1 there and 2 here"
        for each in (schedule, other):
            with pytest.raises(OffloadError, match=differ) as error:
                attach(each, None, options)
            assert "pp_offload.pipelining.detach(schedule)" in str(error.value)
        step(schedule)
        detach(schedule)
    detach(schedule)
    attach(other, None, options).detach()


def test_a_plan_for_another_number_of_microbatches_is_told_of_once(
    schedule: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made_with = {"num_microbatches": 8, "schedule": "Schedule1F1B"}
    with attach(schedule, {"layer": "*"}, OffloadConfig(plan=plan_of(RankPlan(()), **made_with))):
        for _ in range(3):
            step(schedule)
    (line,) = [text for text in caplog.messages if "num_microbatches 8, here 4" in text]
    assert "schedule" not in line


def test_layers_that_a_plan_has_recomputed_have_to_be(schedule: Any) -> None:
    plan = plan_of(RankPlan((), recomputed=(("0", "2"),)))
    config = OffloadConfig(plan=plan, min_offloaded_tensor_size=1)
    expected = step(schedule)
    with recompute_layers(schedule._stage.submod, ["2"]):
        with pytest.raises(OffloadError, match=r"\['0'\] of stage 0 recomputed, and they are not"):
            attach(schedule, {"layer": "*"}, config)
        with (
            recompute_layers(schedule._stage.submod, ["0"]),
            attach(schedule, {"layer": "*"}, config) as handle,
        ):
            for _ in range(3):
                assert same_bits(step(schedule), expected)
            assert handle.manager.statistics().bytes_offloaded > 0


def test_a_handle_tells_what_it_did(schedule: Any) -> None:
    with attach(schedule, {"layer": "*"}, ALL) as handle:
        step(schedule)
        handle.manager.reset()
        handle.manager.step.summary = {"layer": GroupBytes(staying=2**30, copied=2**31)}
        did = "1.00 GiB stay on the device, 2.00 GiB copied, 0 B computed again"
        assert repr(handle) == (
            "<AttachedSchedule of Schedule1F1B: 1 stages; groups layer (3 modules); "
            f"at the peak of the last step {did}>"
        )
    assert "detached" in repr(handle)
    with offload_modules(schedule._stage.submod, {"layer": "0"}) as modules:
        assert f"groups layer (1 modules); at the peak of the last step {did}" in repr(modules)
    assert "removed" in repr(modules)


@pytest.mark.parametrize(
    ("groups", "config", "message"),
    [
        ({"up": "*.upp"}, None, r"'\*\.upp'.*near names.*0\.up"),
        (5, None, "groups is 5, expected a mapping of group names"),
        ({}, None, "groups is empty, expected.*leave it out"),
        ({"up": "*.up"}, {}, r"config is the dict.*OffloadConfig\(\*\*"),
        (None, OffloadConfig(plan=plan_of()), "for 0 pipeline ranks, and here is a rank 0"),
    ],
)
def test_bad_options_leave_the_schedule_alone(
    schedule: Any, groups: Any, config: Any, message: str
) -> None:
    """And when it is detached, schedule and stage have their own methods again."""

    def state() -> list[dict[str, Any]]:
        return [dict(vars(each)) for each in (schedule, schedule._stage)]

    expected, before = step(schedule), state()
    with pytest.raises((TypeError, ValueError), match=message):
        attach(schedule, groups, config)
    assert state() == before
    with attach(schedule, {"up": "*.up"}):
        assert "step" in vars(schedule)
        assert same_bits(step(schedule), expected)
        with pytest.raises(OffloadError, match=r"Schedule1F1B is attached already; detach\(\)"):
            attach(schedule)
    assert vars(schedule) == before[0] and vars(schedule._stage).keys() == before[1].keys()


def test_a_stage_has_one_schedule_at_a_time(schedule: Any) -> None:
    """Two would restore each other's wrappers, if they were detached in the order of attaching."""
    other = type(schedule)(schedule._stage, 2, loss_fn=torch.nn.functional.mse_loss)
    with attach(schedule, {"layer": "*"}):
        with pytest.raises(OffloadError, match=r"stage 0 is attached through another schedule"):
            attach(other)
        assert vars(other).get("_pp_offload_handle") is None
    attach(other).detach()


def two_stages(kind: Any, *parts: nn.Module) -> Any:
    """A schedule whose one rank has two stages, each with one of these parts, of 4 microbatches."""
    device = PipelineOffloadManager.get_instance().backend.device
    models = [nn.Sequential(nn.Sequential(part, nn.Tanh()), nn.Tanh()) for part in parts]
    stages = [PipelineStage(m.to(device), number, 2, device) for number, m in enumerate(models)]
    return kind(stages, 4, loss_fn=nn.functional.mse_loss)


@pytest.mark.skipif(BEFORE_2_13, reason="such a torch cannot send to itself")
@pytest.mark.parametrize("kind", [ScheduleInterleaved1F1B, ScheduleZBVZeroBubble])
def test_stages_that_share_a_module(
    kind: Any, manager: PipelineOffloadManager, one_rank: None
) -> None:
    attn = nn.Linear(8, 8)
    schedule = two_stages(kind, attn, attn)
    expected = step(schedule)
    groups = {"attn": "0.0", "mlp": "1"}
    for _ in range(2):
        with attach(schedule, groups, ALL):
            assert num_hooks(attn) == 1
            for _ in range(3):
                assert same_bits(step(schedule), expected)
            manager.reset()
            assert manager.offload_summary_bytes.keys() == {"attn", "mlp"}
        assert sum(num_hooks(stage.submod) for stage in schedule._stages) == 0
        assert_idle(manager)
    assert same_bits(step(schedule), expected)


def test_a_module_that_has_a_group_of_somebody_else(
    manager: PipelineOffloadManager, one_rank: None
) -> None:
    """One of the same name is no reason to mark nothing: who removes it removes no one else's."""
    attn = nn.Linear(8, 8)
    schedule = two_stages(ScheduleInterleaved1F1B, nn.Linear(8, 8), attn)
    groups = {"attn": "0.0"}
    with offload_modules(schedule._stages[1].submod, groups):
        with pytest.raises(ValueError, match=r"'0\.0' of stage 1 .* 'attn' already"):
            attach(schedule, groups)
        assert sum(num_hooks(stage.submod) for stage in schedule._stages) == 1
    attach(schedule, groups).detach()
    assert sum(num_hooks(stage.submod) for stage in schedule._stages) == 0
