"""F28: groups, or the context, and checkpoints, one inside the other: same bits, nothing left."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from conftest import BACKENDS, BEFORE_2_13, make_backend
from field_checks import hook_depth, make_inputs
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from toy import assert_idle, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadActivations, OffloadConfig, use_backend
from pp_offload._checkpoint.recompute import Recompute
from pp_offload._checkpoint.selective import OpPolicy
from pp_offload.backends import Backend

pytestmark = pytest.mark.field("F28")

Run = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Products are saved, the rest is recomputed."""
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS: dict[str, Run] = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "non-reentrant": partial(checkpoint, use_reentrant=False),
    "selective": partial(
        checkpoint,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, keep_products),
    ),
    "ours": Recompute(),
    "ours, reentrant": Recompute(use_reentrant=True),
}

if not BEFORE_2_13:
    CHECKPOINTS["ours, selective"] = Recompute(
        policy=OpPolicy(frozenset([torch.ops.aten.addmm.default]))
    )


class Part(nn.Module):
    """A linear layer and dropout, so that the random state counts; may be a group."""

    def __init__(self, name: str, is_group: bool, width: int = 6) -> None:
        super().__init__()
        self.name, self.is_group = name, is_group
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        with off_interface(self.is_group, x, self.name) as x:
            y = nn.functional.dropout(torch.tanh(self.linear(x)).sin(), 0.25)
        if self.is_group:
            y = off_interface.group_commit(y, name=self.name)
        return y


class Layer(nn.Module):
    """Two parts under one checkpoint, in the group or around the groups."""

    def __init__(self, nesting: str, run: Run, is_on: bool) -> None:
        super().__init__()
        self.context: AbstractContextManager[object] = nullcontext()
        self.run, self.has_outer = run, is_on and nesting != "groups in checkpoint"
        inside = is_on and nesting != "checkpoint in group"
        self.parts = nn.Sequential(Part("a", inside), Part("b", inside))

    def forward(self, x: Tensor) -> Tensor:
        with off_interface(self.has_outer, x, "outer") as x:
            y = self.run(self.compute, x * 1.0)
        y = off_interface.group_commit(y, name="outer") if self.has_outer else y
        return x + y

    def compute(self, x: Tensor) -> Tensor:
        """The two parts; this is what runs again."""
        with self.context:
            y = self.parts(x)
        return torch.tanh(2 * y)  # saved behind the groups


def build(nesting: str, run: Run, is_on: bool, device: torch.device) -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(*(Layer(nesting, run, is_on) for _ in range(3))).to(device)


def iteration(
    model: nn.Module,
    inputs: list[Tensor],
    is_on: bool,
    context: AbstractContextManager[object] | None = None,
) -> list[Tensor]:
    """Two microbatches in flight; the generator begins the same in every run."""
    torch.manual_seed(5)
    if is_on:
        off_interface.reset()
    done = []
    for x in inputs:
        if is_on:
            off_interface.init_chunk_handler(None, None, 1)
        leaf = x.clone().requires_grad_()
        with context or nullcontext():
            done.append((model(leaf).square().sum(), leaf))
        assert hook_depth() == 0
    results = []
    while done:
        loss, leaf = done.pop(0)
        loss.backward()
        assert hook_depth() == 0
        results += [loss.detach(), leaf.grad]
    results += [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return results


@pytest.mark.covering(1)
@pytest.mark.parametrize("run", CHECKPOINTS.values(), ids=CHECKPOINTS)
@pytest.mark.parametrize("nesting", ["groups in checkpoint", "checkpoint in group", "both"])
@pytest.mark.parametrize("kind", BACKENDS)
def test_same_bits_and_nothing_left(kind: str, nesting: str, run: Run) -> None:
    config = OffloadConfig(min_offloaded_tensor_size=1)
    with use_backend(make_backend(kind), config=config) as manager:
        device = manager.backend.device
        on, off = (build(nesting, run, is_on, device) for is_on in (True, False))
        moved = [0]
        for step in range(3):
            inputs = make_inputs(2, step=step, device=device)
            expected = iteration(off, inputs, False)
            assert same_bits(iteration(on, inputs, True), expected), step
            assert_idle(manager)
            moved.append(manager.statistics().bytes_offloaded)
        assert (moved[1] > 0) == (nesting != "groups in checkpoint"), "groups inside do nothing"
        # The plan may keep what the first step did not; nothing comes to it step by step.
        assert moved[3] - moved[2] <= moved[1]


@pytest.mark.parametrize("kind", BACKENDS)
def test_recompute_opens_no_groups(kind: str) -> None:
    """What backward computes again is used at once, and is not offloaded."""
    config = OffloadConfig(min_offloaded_tensor_size=1)
    with use_backend(make_backend(kind), config=config) as manager:
        device = manager.backend.device
        for name, run in CHECKPOINTS.items():
            model = build("groups in checkpoint", run, True, device)
            manager.reset()
            manager.init_model_chunk_offload_handler(None, None, 1)
            (x,) = make_inputs(1, device=device)
            loss = model(x.requires_grad_()).sum()
            moved = manager.statistics().bytes_offloaded
            loss.backward()
            assert manager.statistics().bytes_offloaded == moved, name
            del loss
            assert_idle(manager)


@pytest.mark.covering(1)
@pytest.mark.parametrize("run", CHECKPOINTS.values(), ids=CHECKPOINTS)
@pytest.mark.parametrize("nesting", ["around checkpoints", "in checkpoints", "both"])
def test_with_the_context(
    activations: OffloadActivations, backend: Backend, nesting: str, run: Run
) -> None:
    """One context around the forward, entered again in each checkpoint, or in those alone."""
    on, off = (build("groups in checkpoint", run, False, backend.device) for _ in range(2))
    if nesting != "around checkpoints":
        for layer in on:
            layer.context = activations
    moved = [0]
    for step in range(3):
        inputs = make_inputs(2, step=step, device=backend.device)
        expected = iteration(off, inputs, False)
        outside = activations if nesting != "in checkpoints" else None
        assert same_bits(iteration(on, inputs, False, outside), expected), step
        assert_idle(activations)
        moved.append(activations.statistics().bytes_offloaded)
    assert (moved[1] > 0) == (nesting != "in checkpoints"), "a context inside does nothing"
    assert moved[3] - moved[2] == moved[2] - moved[1] == moved[1]


@pytest.mark.parametrize("run", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_recompute_in_the_context_opens_no_entries(
    activations: OffloadActivations, backend: Backend, run: Run
) -> None:
    """Also where backward runs inside the context."""
    model = build("groups in checkpoint", run, False, backend.device)
    (x,) = make_inputs(1, device=backend.device)
    with activations:
        loss = model(x.requires_grad_()).sum()
        activations.stash.send_if_full()  # as the next operator that saves would
        moved = activations.statistics().bytes_offloaded
        assert moved > 0
        loss.backward()
    assert activations.statistics().bytes_offloaded == moved
    del loss
    assert_idle(activations)
