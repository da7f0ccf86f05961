"""F14: a pass without grad changes neither the plan nor the bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import BACKENDS, make_backend
from field_checks import Chain, make_inputs, run_moves, schedule
from toy import assert_idle, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, use_backend
from pp_offload._groups.plan import Plan

pytestmark = pytest.mark.field("F14")


def nothing(model: Chain) -> None:
    """No extra pass."""


def evaluate(model: Chain) -> None:
    """A whole evaluation, as a step of its own."""
    off_interface.reset()
    model.eval()
    pass_without_grad(model)
    model.train()


def pass_without_grad(model: Chain) -> None:
    """Two microbatches in whatever mode the model is."""
    device = model.weights[0].device
    with torch.no_grad():
        for x in make_inputs(2, step=9, length=9, device=device):
            off_interface.init_chunk_handler(None, None, 1)
            model(x)


def train(
    kind: str,
    before: Callable[[Chain], None],
    between_steps: Callable[[Chain], None],
    within: Callable[[Chain], None],
) -> tuple[Plan, list[int]]:
    """Four steps with extra passes; the plan and the bytes at the end of each."""
    moved = []
    with use_backend(
        make_backend(kind), config=OffloadConfig(min_offloaded_tensor_size=1)
    ) as manager:
        device = manager.backend.device
        on, off = (Chain(("a", "b"), 2, is_on=b, device=device) for b in (True, False))
        before(on)
        assert manager.statistics().bytes_offloaded == 0
        moves = schedule(4, 2)
        for step in range(4):
            inputs = make_inputs(4, step=step, device=device)
            expected = run_moves([off], inputs, moves, False)

            def with_passes():
                for move in moves:
                    if not move.is_forward:
                        within(on)
                    yield move

            assert same_bits(run_moves([on], inputs, with_passes(), True), expected), step
            between_steps(on)
            assert_idle(manager)
            moved.append(manager.statistics().bytes_offloaded)
        manager.reset()
        return manager.offloader.plan, moved


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize(
    "passes",
    [
        (evaluate, nothing, nothing),
        (pass_without_grad, nothing, nothing),
        (nothing, evaluate, nothing),
        (nothing, pass_without_grad, nothing),
        (nothing, nothing, pass_without_grad),
        (evaluate, evaluate, pass_without_grad),
    ],
    ids=["eval first", "log-prob first", "eval between", "log-prob between", "within", "all"],
)
def test_same_plan_and_bytes(kind: str, passes: tuple[Callable[[Chain], None], ...]) -> None:
    plan, moved = train(kind, *passes)
    assert (plan, moved) == train(kind, nothing, nothing, nothing)
    assert plan.kept
    assert moved[0] > 0
