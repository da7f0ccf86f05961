"""Schedules and Megatron's markers: chunks, virtual stages, delayed groups, and real pipelines."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from helpers.nets import ROWS, WIDTH, Net, inputs, sines, train
from helpers.saving import one_rank
from helpers.sessions import (
    assert_idle,
    assert_same,
    begin_microbatch,
    by_autograd_functions,
    by_functions,
    check,
    drawn,
    gradients,
    group,
    session,
)
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from pp_offload import (
    PipelineOffloadManager,
    attach,
    fine_grained_offloading_group_flush_delayed_groups,
)

pytestmark = pytest.mark.smoke

kinds = pytest.mark.parametrize("kind", ["late", "threads"])

# Orders of one rank


@pytest.mark.field("F13")
@kinds
@pytest.mark.parametrize(("stages", "ahead"), [(1, 3), (2, 1), (3, 3)])
@pytest.mark.parametrize("last_first", [False, True], ids=["fifo", "lifo"])
def test_pipeline_orders_of_virtual_stages(
    kind: str, stages: int, ahead: int, last_first: bool
) -> None:
    nets = [Net(("attn",), layers=1 + n % 2, seed=n) for n in range(stages)]
    options = {"ahead": ahead, "last_first": last_first}
    check(lambda on: train(nets, inputs(4), on, **options), kind, steps=3)  # type: ignore[arg-type]


def test_the_backward_queue_of_virtual_stages() -> None:
    """The last stage goes backward first; looking does not take."""
    with session("late") as manager:
        net, chunks, graphs = Net(("attn",)), [], []
        for stage in range(2):
            begin_microbatch(stages=2, stage=stage)
            chunks.append(manager.cur_forward_chunk())
            graphs.append(net(drawn(ROWS, WIDTH, seed=stage).requires_grad_()))
        manager.flush()
        for chunk in reversed(chunks):
            assert manager.front_backward_chunk("attn") is chunk
            assert manager.front_backward_chunk("mlp") is None
            assert manager.pop_backward_chunk("attn") is chunk
        assert manager.pop_backward_chunk() is None


# Markers


delayed = partial(group, delay_offload=True)
switched_off = partial(group, is_on=False)


@kinds
@pytest.mark.parametrize(
    "mark", [group, by_functions, by_autograd_functions, delayed, switched_off]
)
def test_markers(kind: str, mark: Callable[..., Tensor]) -> None:
    """Of four groups, the last two of which are delayed if any are."""

    def program(is_on: bool) -> list[Tensor]:
        x = h = drawn(ROWS, WIDTH).requires_grad_()
        for number in range(4):
            h = mark(h, sines, name=f"part {number % 2}") if is_on else sines(h)
        fine_grained_offloading_group_flush_delayed_groups()
        h.sum().backward()
        return gradients(x)

    check(program, kind, moves=mark is not switched_off, steps=3)


# By module names, and real pipelines


@pytest.mark.field("F52")
def test_the_forward_that_infers_shapes_leaves_nothing() -> None:
    """A schedule runs one in each step behind ``clear_runtime_states``."""

    def run(is_on: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH)))
        outputs: list[weakref.ref[Tensor]] = []
        model.register_forward_hook(lambda module, args, y: outputs.append(weakref.ref(y)))
        stage = PipelineStage(model, 0, 1, torch.device("cpu"))
        schedule, results = Schedule1F1B(stage, 4, loss_fn=nn.MSELoss()), list[Tensor]()
        with attach(schedule, {"linear": "1"}) if is_on else nullcontext():
            for step in range(2):
                x = drawn(8, WIDTH, seed=step)
                schedule.step(x, target=x.flip(0), losses=results)
                results += gradients(*model.parameters())
                stage.clear_runtime_states()
                assert_idle(PipelineOffloadManager.get_instance())
        assert len(outputs) > 4 * 2, "no forward inferred shapes"
        assert not any(ref() is not None for ref in outputs)
        return [result.detach() for result in results]

    with one_rank(), session("late") as manager:
        assert_same(run(True), run(False))
        assert manager.statistics().bytes_offloaded > 0
