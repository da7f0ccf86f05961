"""Pipelines of virtual ranks: closed forms, and what one rank alone does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.virtual_training import Layers
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from pp_offload import OffloadConfig, PipelineOffloadManager, attach, use_backend
from pp_offload._common.torch_private import knows_sizes
from pp_offload.plan import record
from pp_offload.simulate import (
    DEVICES,
    Modules,
    PeerLink,
    PipelineOrder,
    PipelineStep,
    Times,
    VirtualBackend,
    run_pipeline,
)
from pp_offload.simulate.schedules import SCHEDULES, order_of

EVEN = replace(DEVICES["H100"], launch_s=0)
INSTANT = PeerLink(bytes_per_s=1e30, latency_s=0)
UNIFORM = Times(forward_s=1.0, input_s=1.0, weight_s=1.0)


def order(schedule: Any, num_ranks: int, each: int, num_microbatches: int) -> PipelineOrder:
    """With so many stages on each rank."""
    sizes = {"num_ranks": num_ranks, "stages_per_rank": each, "num_microbatches": num_microbatches}
    return order_of(schedule, **sizes)


GPIPE = order("gpipe", 2, 1, 2)


def uniform(made: PipelineOrder, link: PeerLink = INSTANT) -> PipelineStep:
    """A step of stages that each take a second for each of their three parts."""
    return run_pipeline(made, UNIFORM, EVEN, peers=link, num_steps=1)


# Closed forms


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "each", "num", "bubble_s"),
    [
        ("gpipe", 8, 1, 12, 21),
        ("1f1b", 8, 1, 12, 21),
        ("interleaved1f1b", 4, 4, 16, 9),  # of a stage: a quarter of the rank's work
        ("loopedbfs", 4, 2, 16, 9),
        ("interleavedzerobubble", 4, 2, 16, 3),  # weights fill all but a third
        ("zbv", 4, 2, 16, 3),
        ("dualpipev", 4, 2, 16, 3),
    ],
)
def test_the_bubble_of_a_schedule(
    schedule: str, num_ranks: int, each: int, num: int, bubble_s: float
) -> None:
    """Where each of the three parts of a stage takes a second."""
    step = uniform(order(schedule, num_ranks, each, num))
    assert step.seconds == pytest.approx(3 * each * num + bubble_s, abs=1e-9)
    assert step.bubble == pytest.approx(bubble_s / step.seconds, abs=1e-9)


def test_a_message_takes_its_time_on_the_way_there_and_back() -> None:
    num_ranks, num = 4, 8
    link = PeerLink(bytes_per_s=1.0, latency_s=0.25)  # there are no bytes
    step = uniform(order("gpipe", num_ranks, 1, num), link)
    ways = 2 * (num_ranks - 1)
    assert step.seconds == pytest.approx(3 * (num + num_ranks - 1) + ways * 0.25, abs=1e-9)


# Orders


def test_a_file_says_the_same_as_the_class(tmp_path: Path) -> None:
    made = order("interleavedzerobubble", 2, 2, 4)
    file = tmp_path / "order.csv"
    stages = made._stand_ins()
    made.schedule_of(stages)._dump_csv(file, format="compute_only")
    again = order(file, 2, 2, 4)
    assert again.actions == made.actions and again.rank_of == made.rank_of
    assert run_pipeline(again, UNIFORM, EVEN) == run_pipeline(made, UNIFORM, EVEN)


# Modules

WIDTH, ROWS, NUM = 1024, 2048, 4
SAVED_BYTES = ROWS * WIDTH * 2
KIND: Any = {"device": "meta", "dtype": torch.bfloat16}
CONFIG = OffloadConfig(device_limit_bytes=None, min_offloaded_tensor_size=1)


def inputs() -> Tensor:
    return torch.empty(ROWS, WIDTH, **KIND)


def squares(y: Tensor, *targets: Tensor) -> Tensor:
    return y.float().square().mean()


def modules(num_stages: int) -> Modules:
    return Modules(
        [Layers(NUM, WIDTH) for _ in range(num_stages)], example=inputs(), loss_fn=squares
    )


@pytest.mark.parametrize(("schedule", "each"), [("gpipe", 1), ("interleaved1f1b", 2), ("zbv", 2)])
def test_one_rank_alone_does_what_the_schedule_itself_does(
    schedule: str, each: int, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ``step``, on a virtual device: the same work, bytes and peak."""
    num, backend = 4, VirtualBackend(DEVICES["H100"])
    sample, target = inputs().requires_grad_(), torch.empty(num, 0, **KIND)
    with use_backend(backend, config=CONFIG) as manager:
        stages = [
            PipelineStage(
                Layers(NUM, WIDTH), i, each, backend.device, input_args=sample, output_args=sample
            )
            for i in range(each)
        ]
        several = stages[0] if schedule == "gpipe" else stages
        real = SCHEDULES[schedule](several, num, loss_fn=squares)
        monkeypatch.setattr(real, "_warmup_p2p", lambda *args: None)  # it asks for a number
        split = [(inputs(),) for _ in range(num)], [{}] * num  # not views of a batch
        monkeypatch.setattr(real, "_split_inputs", lambda *args: split)
        for stage in stages:
            knows_sizes(stage)
        with attach(real):
            for _ in range(2):
                for stage in stages:
                    stage.submod.zero_grad()
                busy_s = backend.compute.busy_s
                moved = manager.statistics().bytes_offloaded
                backend.synchronize()  # as ranks do that begin together
                backend.memory.take_peak()
                real.step(*split[0][0], target=target, return_outputs=False)
            moved = manager.statistics().bytes_offloaded - moved
    made = order(schedule, 1, each, num)
    (rank_step,) = run_pipeline(made, modules(each), DEVICES["H100"], config=CONFIG).ranks
    assert rank_step.bytes_offloaded == moved
    assert rank_step.busy_s == pytest.approx(backend.compute.busy_s - busy_s, abs=1e-12)
    assert rank_step.peak_bytes == backend.memory.peak_bytes


def test_each_rank_has_a_host_budget_of_its_own() -> None:
    """Room for a microbatch of two that are in flight, as if in a process for each."""
    config = replace(CONFIG, host_budget_bytes=NUM * SAVED_BYTES)
    step = run_pipeline(GPIPE, modules(2), DEVICES["H100"], config=config, num_steps=1)
    assert [rank.host_peak_bytes for rank in step.ranks] == [NUM * SAVED_BYTES] * 2


def test_a_slow_network_is_waited_for() -> None:
    made, work = order("gpipe", 2, 1, 4), modules(2)
    fast, slow = (
        run_pipeline(made, work, EVEN, peers=PeerLink(bytes_per_s=rate, latency_s=0))
        for rate in (1e30, 1e9)
    )
    on_the_way_s = SAVED_BYTES / 1e9
    forward_s = fast.ranks[0].busy_s / 4 / 2  # of the first stage: no gradient of its input
    assert forward_s < on_the_way_s, "so messages wait for each other"
    waited_s = slow.ranks[1].waited_s[0]
    assert waited_s > 4 * on_the_way_s - 4 * forward_s
    assert slow.ranks[1].waits_most_for == 0 and slow.seconds > 8 * on_the_way_s


def test_tracebacks_of_the_program_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process group has them begin with a rank, and one is made on the way."""

    def mine(*args: Any) -> None: ...

    monkeypatch.setattr(sys, "excepthook", mine)
    for run in (run_pipeline, record):
        run(GPIPE, modules(2), EVEN)
        assert sys.excepthook is mine


def test_a_failure_leaves_no_manager_behind() -> None:
    before = PipelineOffloadManager.OFFLOAD_MGR

    def fail(y: Tensor) -> Tensor:
        raise KeyError("a loss")

    work = Modules(modules(2).stages, example=inputs(), loss_fn=fail)
    with pytest.raises(KeyError, match="a loss"):
        run_pipeline(GPIPE, work, EVEN, config=CONFIG)
    assert PipelineOffloadManager.OFFLOAD_MGR is before
    assert not hasattr(work.stages[0], "_pp_offload_handle")
    step = run_pipeline(GPIPE, modules(2), EVEN, config=CONFIG)
    assert step.ranks[0].bytes_offloaded > 0


def of_text(text: str, path: Path) -> PipelineOrder:
    """The order of one microbatch on one rank that a file gives."""
    (path / "order.csv").write_text(text)
    return order(path / "order.csv", 1, 1, 1)


WRONG: dict[str, Callable[[Path], object]] = {
    "order is": lambda path: run_pipeline("gpipe", UNIFORM, EVEN),
    "num_steps is 0, expected": lambda path: run_pipeline(GPIPE, UNIFORM, EVEN, num_steps=0),
    "schedule is 3, expected a class of torch.distributed": lambda path: order(3, 2, 1, 2),
    "num_stages is 4 with 2 ranks, expected as many": lambda path: order("1f1b", 2, 2, 4),
    "num_stages is 5 with 2 ranks, expected a multiple": lambda path: PipelineOrder(
        SCHEDULES["interleaved1f1b"], num_ranks=2, num_stages=5, num_microbatches=4
    ),
    "Number of microbatches": lambda path: order("1f1b", 4, 1, 2),
    "order.csv.*what": lambda path: of_text("what,is,this\n", path),
    r'DEVICES\["H100"\]': lambda path: VirtualBackend("H100"),
    "forward_s is -1, expected a num": lambda path: Times(forward_s=-1, input_s=1, weight_s=1),
    "bytes_per_s is 0, expected a number above 0": lambda path: PeerLink(bytes_per_s=0),
    "are 3 modules for 2 stages": lambda path: run_pipeline(GPIPE, modules(3), EVEN),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_makes_no_sense_is_refused(message: str, tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        WRONG[message](tmp_path)
