"""Steps that differ from each other, or are cut off: F13, F14, F15, F18, F21, F48, F52."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from conftest import on_two_backends
from helpers.kept import Raises
from helpers.scenarios import (
    Chain,
    Move,
    begin,
    check_moves,
    check_steps,
    make_inputs,
    manager_on,
    ordered,
    run_moves,
    schedule,
)
from helpers.sessions import gradients, group
from helpers.toy import assert_idle, assert_no_hooks, make_model, same_bits
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import PipelineOffloadManager
from pp_offload.backends import Backend
from pp_offload.pipelining import attach

# F13: every number of layers, groups and stages


@pytest.mark.field("F13")
@on_two_backends
@pytest.mark.parametrize("fraction", [1.0, 0.0], ids=["all leave", "all stay after the first"])
@pytest.mark.parametrize("vp_size", [1, 2])
def test_every_number_of_layers(backend: Backend, vp_size: int, fraction: float) -> None:
    sizes = product((1, 2, 3), (1, 2, 3), (1, 2, 4)) if backend.name == "cpu" else [(1, 2, 2)]
    for layers, groups, stages in list(sizes)[:: 2 * vp_size - 1]:
        with manager_on(backend, activation_offload_fraction=fraction) as manager:
            chains = [
                Chain("abc"[:groups], layers, device=backend.device, seed=seed)
                for seed in range(vp_size)
            ]
            moved = [
                check_moves(
                    manager,
                    chains,
                    make_inputs(8, step=step, device=backend.device),
                    schedule(8, stages, vp_size, stages),
                )
                for step in range(3)
            ]
            assert moved[0] > 0
            assert fraction or moved[1:] == [0, 0]


# F14 and F15: passes without grad, before, between and within steps


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


def evaluate(chain: Chain, *, num: int = 2, fails_after: int = 99, is_step: bool = True) -> None:
    """Microbatches without grad, which may be a step of their own."""
    if is_step:
        off_interface.reset()
    inputs = make_inputs(num, step=9, length=7, device=chain.weights[0].device)
    with torch.no_grad(), failing(chain, fails_after), suppress(Stop):
        for x in inputs:
            begin()
            chain(x)


def plan_and_bytes(
    backend: Backend,
    *,
    before: Callable[[Chain], None] | None = None,
    between: Callable[[Chain], None] | None = None,
    within: Callable[[Chain], None] | None = None,
) -> tuple[Any, list[int]]:
    """Four steps with extra passes; the plan, and the bytes of each."""

    def extra(run: Callable[[Chain], None] | None) -> None:
        if run is not None:
            chain.is_on = True
            offloaded = manager.statistics().bytes_offloaded
            run(chain)
            assert manager.statistics().bytes_offloaded == offloaded

    def moves() -> Iterator[Move]:
        for move in schedule(4, 2):
            if not move.is_forward:
                extra(within)
            yield move

    with manager_on(backend, device_limit_bytes=None) as manager:
        chain, moved = Chain(layers=2, device=backend.device), [0]
        extra(before)
        for step in range(4):
            inputs = make_inputs(4, step=step, device=backend.device)
            expected = run_moves(chain, inputs, schedule(4, 2), False)
            assert same_bits(run_moves(chain, inputs, moves(), True), expected), step
            extra(between)
            assert_idle(manager)
            moved.append(manager.statistics().bytes_offloaded)
        manager.reset()
        return manager.offloader.plan, moved


@pytest.mark.field("F14")
@pytest.mark.field("F15")
@ordered
def test_passes_without_grad_change_nothing(backend: Backend) -> None:
    """Evaluations of any length, one that raises midway, and log-prob passes."""
    plan, moved = plan_and_bytes(backend)
    assert plan.kept and moved[1] > 0
    within = partial(evaluate, is_step=False)
    for extra in (
        {"before": evaluate},
        {"before": within},
        {"within": within},
        {"between": partial(evaluate, num=7)},
        {"between": partial(evaluate, num=4, is_step=False)},
        {"between": partial(evaluate, num=4, fails_after=2)},
        {"between": partial(evaluate, num=4, fails_after=2, is_step=False)},
        {"before": evaluate, "between": evaluate, "within": within},
    ):
        assert plan_and_bytes(backend, **extra) == (plan, moved), extra


def pipeline(kind: Any, model: nn.Module, num_microbatches: int) -> Any:
    device = next(model.parameters()).device
    return kind(PipelineStage(model, 0, 1, device), num_microbatches, loss_fn=nn.MSELoss())


def data(model: nn.Module, num_microbatches: int) -> Tensor:
    x = torch.linspace(-1, 1, 16 * num_microbatches).view(2 * num_microbatches, 8)
    return x.to(next(model.parameters()).device)


def train(pipe: Any, model: nn.Module) -> list[Tensor]:
    """The losses and gradients of one step."""
    losses: list[Tensor] = []
    pipe.step(data(model, 4), target=data(model, 4).flip(0), losses=losses)
    return [*(loss.detach() for loss in losses), *gradients(*model.parameters())]


# F18: aborted steps


class Boom(Exception):
    """What goes wrong."""


def boom(*args: object, **kwargs: object) -> Any:
    raise Boom


def in_the_group_body(chain: Chain, x: Tensor, manager: PipelineOffloadManager) -> None:
    group(chain(x), lambda h: boom(h.sin()))


def between_start_and_commit(chain: Chain, x: Tensor, manager: PipelineOffloadManager) -> None:
    with off_interface(True, chain(x), "a") as h:
        h.sin()
    boom()


def in_pack(chain: Chain, x: Tensor, manager: PipelineOffloadManager) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager.offloader.engine.eligibility, "admits", boom)
        chain(x)


def in_the_copy(chain: Chain, x: Tensor, manager: PipelineOffloadManager) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager.backend, "copy", boom)
        chain(x)


def in_backward(chain: Chain, x: Tensor, manager: PipelineOffloadManager) -> None:
    chain(Raises.apply(chain(x), Boom)).sum().backward()


def dropped_forwards(chain: Chain, x: Tensor, manager: PipelineOffloadManager) -> None:
    """Of two microbatches, of which the second goes backward."""
    first = chain(x)
    begin()
    chain(x).sum().backward()
    del first
    boom()


@pytest.mark.field("F18")
@ordered
@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize(
    "fails",
    [
        in_the_group_body,
        between_start_and_commit,
        in_pack,
        in_the_copy,
        in_backward,
        dropped_forwards,
    ],
)
def test_an_aborted_step_leaves_nothing(
    manager: PipelineOffloadManager, fails: Callable[..., None], num_before: int
) -> None:
    """The next steps are right; and it is not the first, whose groups the plan is made of."""
    device, chain = manager.backend.device, Chain(layers=2, device=manager.backend.device)

    def steps(*numbers: int) -> None:
        for number in numbers:
            check_moves(manager, chain, make_inputs(3, step=number, device=device), schedule(3, 2))

    steps(*range(num_before))
    for _ in range(2):
        manager.reset()
        begin()
        chain.is_on = True
        was_raised = False
        try:
            fails(chain, make_inputs(1, device=device)[0].requires_grad_(), manager)
        except Boom:
            was_raised = True
        assert was_raised
        assert_no_hooks()
        chain.zero_grad()
    manager.reset()
    assert_idle(manager)
    if not num_before:
        assert not manager.offloader.plan.kept and manager.step.is_warmup
    steps(2, 3, 4)


# F21: more microbatches, and more groups


@pytest.mark.field("F21")
@ordered
@pytest.mark.parametrize(("ahead", "vp_size"), [(1, 1), (4, 1), (3, 2)])
def test_more_microbatches_than_the_first_step_had(
    backend: Backend, ahead: int, vp_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="pp_offload")
    counts = (2, 6, 3, 8, 8)
    with manager_on(backend, device_limit_bytes=None) as manager:
        stages = [Chain(device=backend.device, seed=seed) for seed in range(vp_size)]
        moved = [
            check_moves(
                manager,
                stages,
                make_inputs(count, step=step, device=backend.device),
                schedule(count, ahead, vp_size, vp_size),
            )
            for step, count in enumerate(counts)
        ]
        manager.reset()
    for count, nbytes in zip(counts, moved, strict=True):
        # At most the last of three layers of a microbatch stays, if its backward is next.
        assert 2 / 3 * count * moved[0] / 2 <= nbytes <= count * moved[0] / 2
    assert caplog.text.count("the step changed") == 3


# F48: a first input without grad


class OfTokens(nn.Module):
    """An embedding, and layers of two groups, with adapters."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.is_inside = kind == "first stage on integers"
        self.embedding = nn.Embedding(11, 6).requires_grad_(self.is_inside)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))
        self.adapters = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(6))
        self.layers.requires_grad_(kind != "LoRA")

    def forward(self, tokens: Tensor, is_on: bool) -> Tensor:
        x = tokens if self.is_inside else self.embedding(tokens)
        for number, (layer, adapter) in enumerate(zip(self.layers, self.adapters, strict=True)):

            def compute(x: Tensor, layer: Any = layer, adapter: Any = adapter) -> Tensor:
                x = x if x.is_floating_point() else self.embedding(x)
                return torch.tanh(layer(x)) + adapter(x).sin()

            x = group(x, compute, is_on, "ab"[number % 2])
        return x.square().mean()


@pytest.mark.field("F48")
@on_two_backends
@pytest.mark.parametrize("kind", ["frozen embedding", "first stage on integers", "LoRA"])
@pytest.mark.parametrize("in_flight", [1, 4])
def test_an_input_without_grad(manager: PipelineOffloadManager, kind: str, in_flight: int) -> None:
    """Prefetch keeps up: no reload on demand in steady state."""
    model = OfTokens(kind).to(manager.backend.device)
    on_demand = []

    def step(is_on: bool, number: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(number)
        waiting: list[Tensor] = []
        for _ in range(6):
            begin(is_on)
            tokens = torch.randint(11, (5,), generator=generator).to(manager.backend.device)
            waiting.append(model(tokens, is_on))
            if len(waiting) == in_flight:
                waiting.pop(0).backward()
        while waiting:
            waiting.pop(0).backward()
        on_demand.append(manager.statistics().on_demand_reloads)
        return gradients(*(p for p in model.parameters() if p.requires_grad))

    check_steps(manager, step, steps=4)
    assert on_demand[-1] == on_demand[3], "after the second step with offload"
    assert manager.statistics().prefetched_reloads + manager.statistics().taken_back > 0


# F52: shapes that a schedule infers


@pytest.mark.field("F52")
@on_two_backends
@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B])
def test_what_runs_to_infer_shapes_leaves_nothing(
    manager: PipelineOffloadManager, one_rank: None, kind: Any
) -> None:
    device, num_steps = manager.backend.device, 3

    def run(groups: tuple[str, ...]) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(8, 8), make_model(groups=groups)).to(device)
        torch.manual_seed(1)
        nn.init.normal_(model[0].weight)
        nn.init.zeros_(model[0].bias)
        outputs: list[weakref.ref[Tensor]] = []
        model.register_forward_hook(lambda module, args, y: outputs.append(weakref.ref(y)))
        pipe, results = pipeline(kind, model, 4), []
        with attach(pipe) if groups else nullcontext():
            for _ in range(num_steps):
                results += train(pipe, model)
                pipe._stage.clear_runtime_states()
                gc.collect()
                assert_idle(manager)
                assert not [ref for ref in outputs if ref() is not None]
        assert len(outputs) > 4 * num_steps, "shapes were inferred by a forward"
        return results

    assert same_bits(run(("mix", "mlp")), run(()))
    assert manager.statistics().bytes_offloaded > 0
