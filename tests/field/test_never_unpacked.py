"""F17: saved tensors that backward never asks for leave nothing behind, however many steps."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from field_checks import Chain, make_inputs, part
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from toy import assert_idle, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadActivations, PipelineOffloadManager
from pp_offload.backends import Backend

pytestmark = pytest.mark.field("F17")

NUM_MICROBATCHES = 3

Forward = Callable[[Chain, Tensor, int], Tensor | None]
"""The loss of a microbatch, or None if it is dropped. The number counts microbatches."""


def unused_branch(model: Chain, x: Tensor, number: int) -> Tensor:
    """Every second microbatch computes a branch that its loss does not need."""
    h = model(x)
    branch = part("branch", h, model.weights[0], model.is_on)
    return (h if number % 2 else h * branch).square().mean()


def branch_cut_off(model: Chain, x: Tensor, number: int) -> Tensor:
    """Two groups one behind the other, both cut off from the loss by ``detach``."""
    h = model(x)
    branch = part("c", part("b", h, model.weights[0], model.is_on), model.weights[1], model.is_on)
    return (h + branch.detach()).square().mean()


def dropped_loss(model: Chain, x: Tensor, number: int) -> Tensor | None:
    """As for a microbatch that is skipped because its loss is not finite."""
    loss = model(x).square().mean()
    return loss if number % 3 else None


def expert_off_the_path(model: Chain, x: Tensor, number: int) -> Tensor:
    """All experts compute; the router takes the outputs of one or two of them."""
    h = model(x)
    experts = [part(f"expert {i}", h, w, model.is_on) for i, w in enumerate(model.weights)]
    chosen = {number % len(experts), (number // 2) % len(experts)}
    return sum((experts[i] for i in chosen), start=h).square().mean()


def frozen_input_grad(model: Chain, x: Tensor, number: int) -> Tensor:
    """What is saved for the gradients of weights that nobody asks for is not read."""
    wanted = model(x).square().mean()
    (of_input,) = torch.autograd.grad(wanted, x, retain_graph=bool(number % 2))
    return (x * of_input).sum()


def recomputed(model: Chain, x: Tensor, number: int) -> Tensor:
    """Backward runs the forward of a group again; not all it saves then is asked for."""

    def two_groups(x: Tensor) -> Tensor:
        with off_interface.get_context(model.is_on):
            y = model(x)
            model(y)
        return y

    reentrant = bool(number % 2)
    return checkpoint(two_groups, model(x), use_reentrant=reentrant).square().mean()


def run_step(
    model: Chain,
    forward: Forward,
    step: int,
    context: AbstractContextManager[object] | None = None,
) -> list[Tensor]:
    """All forwards, each in ``context``, then the backwards; every gradient."""
    if model.is_on:
        off_interface.reset()
    inputs = make_inputs(NUM_MICROBATCHES, step=step, device=model.weights[0].device)
    losses = []
    for index, x in enumerate(inputs):
        if model.is_on:
            off_interface.init_chunk_handler(None, None, 1)
        with context or nullcontext():
            losses.append(forward(model, x.requires_grad_(), step * NUM_MICROBATCHES + index))
    for loss in losses:
        if loss is not None:
            loss.backward()
    gradients = [t.grad for t in (*inputs, *model.weights) if t.grad is not None]
    model.zero_grad()
    return gradients


def living_tensors() -> int:
    """How many tensors Python knows of, on whatever device."""
    gc.collect()
    return sum(issubclass(type(one), Tensor) for one in gc.get_objects())


forwards = pytest.mark.parametrize(
    "forward",
    [
        unused_branch,
        branch_cut_off,
        dropped_loss,
        expert_off_the_path,
        frozen_input_grad,
        recomputed,
    ],
)


steps = pytest.mark.parametrize(
    ("num_first", "num_steps"), [(8, 16), pytest.param(10, 50, marks=pytest.mark.exhaustive)]
)
"""The same experts are on the path in every eighth step."""


@pytest.mark.quick("late")
@steps
@forwards
def test_never_unpacked(
    manager: PipelineOffloadManager, forward: Forward, num_first: int, num_steps: int
) -> None:
    check_steps(manager, manager.backend, forward, num_first, num_steps)


@pytest.mark.quick("late")
@steps
@forwards
def test_never_unpacked_in_the_context(
    activations: OffloadActivations,
    backend: Backend,
    forward: Forward,
    num_first: int,
    num_steps: int,
) -> None:
    check_steps(activations, backend, forward, num_first, num_steps)


def check_steps(
    engine: PipelineOffloadManager | OffloadActivations,
    backend: Backend,
    forward: Forward,
    num_first: int,
    num_steps: int,
) -> None:
    """Right in each of many steps; after the last there is as much as after the first few."""
    has_groups = isinstance(engine, PipelineOffloadManager)
    on, off = (Chain(("a", "b"), 2, is_on=b, device=backend.device) for b in (has_groups, False))
    context = None if has_groups else engine
    found: list[tuple[int, int, int]] = []
    for step in range(num_steps):
        expected = run_step(off, forward, step)
        before = engine.statistics().bytes_offloaded
        assert same_bits(run_step(on, forward, step, context), expected), step
        assert engine.statistics().bytes_offloaded > before
        del expected
        assert_idle(engine)
        if step in (num_first - 1, num_steps - 1):
            backend.synchronize()
            offloader = engine.offloader if has_groups else engine.stash._offloader
            offloader.engine.shared.forget_dead()  # as the next step or forward would
            statistics = engine.statistics()
            reserved, peak = statistics.host_bytes_reserved, statistics.host_bytes_peak
            found.append((living_tensors(), reserved, peak))
    assert found[0] == found[1], "tensors, host bytes reserved, most host bytes in use"


def test_a_loss_that_is_kept_holds_its_own_bytes(manager: PipelineOffloadManager) -> None:
    """Graphs nobody ran backward live as long as their loss, and not longer."""
    model = Chain(("a", "b"), 1, device=manager.backend.device)
    in_use, kept = [], []
    for step in range(6):
        off_interface.reset()
        off_interface.init_chunk_handler(None, None, 1)
        (x,) = make_inputs(1, step=step, device=manager.backend.device)
        kept.append(model(x).sum())
        in_use.append(manager.statistics().host_bytes_in_use)
        if len(kept) == 2:
            kept.pop(0)
    assert in_use[0] > 0
    assert in_use[1:] == [2 * in_use[0]] * 5
    kept.clear()
    assert_idle(manager)
