"""An optimizer at the end of each step: its state, what it takes on the way, and its time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from beside_engine import OPTIMIZERS, compare, ran_with_optimizer
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

from pp_offload import OffloadConfig
from pp_offload._groups import auto_bounds
from pp_offload.plan import Chooser, InfeasibleError, OffloadPlan, choose, predict, record
from pp_offload.plan.recorder import rounded
from pp_offload.simulate import DEVICES, Modules, PipelineOrder, run_pipeline

KIND: Any = {"device": "meta", "dtype": torch.bfloat16}
WIDTH = 512
CONFIG = OffloadConfig(min_offloaded_tensor_size=1)
DEVICE = DEVICES["H100"]


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_bounds, "LEAST_IN_FLIGHT_BYTES", 1)


def test_random_pipelines_cost_what_they_cost_the_engine() -> None:
    found = compare(range(16), ran_with_optimizer)
    assert {one.drawn.num_steps for one in found} == {1, 2, 3, 4}
    assert sum(one.tapes[0].update.state_bytes > 0 for one in found) > 8


@pytest.mark.slow
def test_more_of_them() -> None:
    compare(range(16, 46), ran_with_optimizer)


def pipeline(name: str | None) -> tuple[PipelineOrder, Modules]:
    """Two ranks, each with two stages of layers that are large beside what they save."""
    stages = [
        nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, **KIND), nn.GELU()) for _ in "ab"))
        for _ in range(2)
    ]
    work = Modules(
        stages,
        example=torch.empty(64, WIDTH, **KIND),
        loss_fn=lambda y: y.sum(),
        groups={"layer": "*"},
        optimizer=None if name is None else OPTIMIZERS[name],
    )
    return PipelineOrder(Schedule1F1B, num_ranks=2, num_stages=2, num_microbatches=4), work


@pytest.mark.parametrize(
    ("name", "of_a_parameter"),
    [("SGD", 0), ("SGD with momentum", 1), ("AdamW", 2), ("AdamW, one by one", 2), ("Adam", 3)],
)
def test_its_state_is_there_from_the_first_step_on(name: str, of_a_parameter: int) -> None:
    order, work = pipeline(name)
    mine = [one.nbytes for one in work.stages[0].parameters()]
    (tapes, _) = record(order, work, DEVICE, CONFIG)
    assert tapes.update.state_bytes == of_a_parameter * sum(mine)
    assert sum(one.nbytes for one in tapes.update.later) == 0
    steps = [
        predict(order, [tapes, tapes_of(order, work)], DEVICE, num_steps=num) for num in (1, 2)
    ]
    assert steps[1].ranks[0].peak_bytes >= steps[0].ranks[0].peak_bytes
    assert (steps[0] == steps[1]) is (of_a_parameter == 0)


def tapes_of(order: PipelineOrder, work: Modules) -> Any:
    return record(order, work, DEVICE, CONFIG)[1]


def test_all_parameters_at_once_take_more_on_the_way() -> None:
    """PyTorch's default on an accelerator has temporary memory for all of them."""
    peaks = []
    for name in ("AdamW", "AdamW, one by one"):
        (tapes, _) = record(*pipeline(name), DEVICE, CONFIG)
        live = peak = 0
        for one in tapes.update.later:
            peak = max(peak, live + one.rise)
            live += one.nbytes
        peaks.append(peak)
    parameters = sum(one.nbytes for one in pipeline(None)[1].stages[0].parameters())
    assert peaks[0] >= parameters > peaks[1] > 0


def test_without_one_nothing_changes() -> None:
    order, work = pipeline(None)
    tapes = record(order, work, DEVICE, CONFIG)
    with_sgd = record(*pipeline("SGD"), DEVICE, CONFIG)
    for plain, with_state in zip(tapes, with_sgd, strict=True):
        assert plain.resident_bytes == with_state.resident_bytes
        payloads = [
            [each._replace(again=None) for tape in rank.stages.values() for each in tape.payloads]
            for rank in (plain, with_state)  # what rounding leaves of a clock is in ``again``
        ]
        assert payloads[0] == payloads[1]
    assert all(one.update == ((), ()) for one in tapes)


def test_it_ends_the_step_of_each_rank() -> None:
    none, some = (run_pipeline(*pipeline(name), DEVICE, config=CONFIG) for name in (None, "AdamW"))
    for one, other in zip(none.ranks, some.ranks, strict=True):
        assert other.seconds > one.seconds and other.busy_s > one.busy_s


def test_memory_says_what_is_its_state() -> None:
    class Looks:
        def __init__(self) -> None:
            self.found: list[dict[str, int]] = []

        def ranks(self, managers: Any) -> Any:
            self.managers = managers
            return self

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None:
            self.found = [one.backend.memory.live for one in self.managers]

    looks = Looks()
    order, work = pipeline("AdamW")
    run_pipeline(order, work, DEVICE, config=CONFIG, trace=looks)
    parameters = sum(one.nbytes for one in work.stages[0].parameters())
    assert looks.found[0]["optimizer"] == 2 * parameters


# Plans


def test_a_plan_is_below_its_limit_with_it() -> None:
    order, work = pipeline("AdamW")
    tapes = record(order, work, DEVICE, CONFIG)
    none = predict(order, tapes, DEVICE, num_steps=2)
    most = max(rank.peak_bytes for rank in none.ranks)
    plan = choose(order, tapes, DEVICE, most - 1, config=CONFIG)
    step = run_pipeline(order, work, DEVICE, config=replace(CONFIG, plan=plan), num_steps=3)
    state = [one.update.state_bytes for one in tapes]
    for rank, one, nbytes in zip(plan.ranks, step.ranks, state, strict=True):
        assert rank.peak_bytes == one.peak_bytes < most
        assert rank.optimizer_bytes == nbytes > 0
    assert plan.seconds >= plan.least_seconds * (1 - 1e-9)
    assert OffloadPlan.from_dict(plan.to_dict()) == plan


def test_the_step_without_offload_has_its_state() -> None:
    order, work = pipeline("AdamW")
    tapes = record(order, work, DEVICE, CONFIG)
    found = Chooser(order, tapes, DEVICE, config=CONFIG).without_offload()
    assert found == predict(order, tapes, DEVICE, num_steps=2)
    assert found != predict(order, tapes, DEVICE, num_steps=1)


def test_the_least_limit_counts_it() -> None:
    least = []
    for name in (None, "AdamW"):
        order, work = pipeline(name)
        tapes = record(order, work, DEVICE, CONFIG)
        with pytest.raises(InfeasibleError) as refused:
            choose(order, tapes, DEVICE, 1, config=CONFIG)
        least.append(refused.value.least_bytes)
    parameters = sum(one.nbytes for one in pipeline(None)[1].stages[0].parameters())
    assert least[1] >= least[0] + 2 * parameters


def test_a_limit_that_is_refused_says_how_much_is_its_state() -> None:
    for name in (None, "SGD", "AdamW"):
        order, work = pipeline(name)
        chooser = Chooser(order, record(order, work, DEVICE, CONFIG), DEVICE, config=CONFIG)
        with pytest.raises(InfeasibleError, match="whatever leaves") as refused:
            chooser.plan(1)
        state = sum(one.nbytes for one in work.stages[0].parameters()) * 2 / 2**20
        said = f"rank 0 needs whatever leaves, {state:.2f} MiB of that for its optimizer's state; "
        assert (said in str(refused.value)) is (name == "AdamW")
        assert ("state" in str(refused.value)) is (name == "AdamW")


def test_part_of_the_state_is_an_optimizer_of_part_of_the_parameters() -> None:
    """As where states are sharded over replicas."""

    def sharded(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        parts = [nn.Parameter(one.detach().flatten()[: one.numel() // 4]) for one in parameters]
        for part in parts:
            part.grad = torch.empty_like(part)
        return torch.optim.AdamW(parts)

    order, work = pipeline(None)
    work.optimizer = sharded
    (part, _) = record(order, work, DEVICE, CONFIG)
    quarters = [rounded(one.nbytes // 4) for one in work.stages[0].parameters()]
    assert part.update.state_bytes == 2 * sum(quarters)


# What is refused


def test_a_rank_with_nothing_to_train_has_none() -> None:
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH, **KIND)), nn.Sequential(nn.GELU())]
    work = Modules(
        stages,
        example=torch.empty(64, WIDTH, **KIND),
        loss_fn=lambda y: y.float().mean(),
        groups={"layer": "*"},
        optimizer=torch.optim.AdamW,
    )
    order = PipelineOrder(Schedule1F1B, num_ranks=2, num_stages=2, num_microbatches=2)
    tapes = record(order, work, DEVICE, CONFIG)
    assert [bool(one.update.state_bytes) for one in tapes] == [True, False]
    step = run_pipeline(order, work, DEVICE, config=CONFIG)
    assert predict(order, tapes, DEVICE, config=CONFIG).ranks[1].peak_bytes == (
        step.ranks[1].peak_bytes
    )


def test_an_optimizer_that_cannot_be_made_leaves_the_model_as_it_was() -> None:
    order, work = pipeline("AdamW")
    made = work.optimizer

    def fails(parameters: list[nn.Parameter]) -> Any:
        raise ZeroDivisionError

    work.optimizer = fails
    for run in (record, run_pipeline):
        with pytest.raises(ZeroDivisionError):
            run(order, work, DEVICE, config=CONFIG)
    work.optimizer = made
    assert run_pipeline(order, work, DEVICE, config=CONFIG).seconds > 0


def test_what_is_no_optimizer_is_refused() -> None:
    order, work = pipeline(None)
    with pytest.raises(TypeError, match="optimizer is 'AdamW', expected a function of a list"):
        Modules(work.stages, example=(), loss_fn=lambda y: y.sum(), optimizer="AdamW")  # type: ignore[arg-type]
    work.optimizer = lambda parameters: parameters  # type: ignore[assignment,return-value]
    with pytest.raises(ValueError, match="what optimizer returns is .*expected a torch.optim.Opt"):
        run_pipeline(order, work, DEVICE, config=CONFIG)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (torch.optim.Adafactor, "Adafactor"),  # looks at data
        (torch.optim.LBFGS, "LBFGS"),  # wants a closure
        (lambda p: torch.optim.AdamW(p, capturable=True), "AdamW"),
        (lambda p: torch.optim.AdamW(p, fused=True), "AdamW"),
    ],
)
def test_one_that_cannot_run_here_is_refused(make: Any, name: str) -> None:
    order, work = pipeline(None)
    work.optimizer = make
    message = f"the optimizer is {name}, expected one that can run without data.*leave room"
    for run in (run_pipeline, record):
        with pytest.raises(ValueError, match=message):
            run(order, work, DEVICE, config=CONFIG)
