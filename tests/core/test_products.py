"""One test of each product on the engine, and groups together with PyTorch's checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from helpers.nets import ROWS, WIDTH
from helpers.sessions import (
    assert_idle,
    assert_same,
    begin_step,
    drawn,
    gradients,
    group,
    make_backend,
    session,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from pp_offload import (
    OffloadActivations,
    OffloadHiddenStates,
    OffloadModel,
    PipelineOffloadManager,
    checkpoint,
    checkpoint_wrapper,
    offload_layers,
)

pytestmark = pytest.mark.smoke

kinds = pytest.mark.parametrize("kind", ["late", "threads"])

LAYERS = 4


class Block(nn.Module):
    """A layer that asks for a checkpoint as those of Hugging Face do."""

    gradient_checkpointing = False

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def compute(self, x: Tensor) -> Tensor:
        return x + self.down(torch.sigmoid(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(self.compute, x)
        return self.compute(x)


def make_model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(Block() for _ in range(LAYERS)))


def step(model: Any, run: Any, around: Any) -> list[Tensor]:
    """Losses and gradients of two microbatches in flight."""
    graphs = []
    for number in range(2):
        x = drawn(ROWS, WIDTH, seed=number).requires_grad_()
        with around or nullcontext():
            graphs.append((x, run(x).square().mean()))
    results: list[Tensor] = []
    for x, loss in graphs:
        loss.backward()
        results += [loss.detach(), *gradients(x)]
    return results + gradients(*model.parameters())


def check_steps(plain: Any, model: Any, run: Any = None, around: Any = None) -> None:
    """Steps of a model with offload have the results of a plain one.

    Args:
        plain: A model with the same weights.
        model: Whose gradients are compared.
        run: What is called; the model if None.
        around: A context around each forward, with statistics.
    """
    expected = step(plain, plain, None)
    for number in range(3):
        assert_same(step(model, run or model, around), expected, f"step {number}")
        if around is not None:
            assert around.statistics().bytes_offloaded > 0
            assert_idle(around)


@kinds
@pytest.mark.parametrize("stash", [1, 5])
def test_offload_activations(kind: str, stash: int) -> None:
    backend = make_backend(kind)
    with backend.activate():
        context = OffloadActivations(min_offload_size=1, max_fwd_stash_size=stash, backend=backend)
        check_steps(make_model(), make_model(), around=context)


@kinds
def test_checkpoints_whose_inputs_leave(kind: str) -> None:
    """By the function and by the wrapper."""
    backend, plain, wrapped = make_backend(kind), make_model(), make_model()

    def by_function(x: Tensor) -> Tensor:
        for layer in plain:
            x = checkpoint(layer, x, offload_inputs=True, min_offload_size=1, backend=backend)
        return x

    for number, layer in enumerate(wrapped):
        wrapped[number] = checkpoint_wrapper(layer, offload_to_cpu=True, backend=backend)
    with backend.activate():
        check_steps(plain, plain, by_function)
        check_steps(plain, wrapped)


@kinds
def test_offload_hidden_states(kind: str) -> None:
    """What checkpointed layers are given leaves, and nothing else."""
    backend, model = make_backend(kind), make_model()
    for layer in model:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(torch_checkpoint, use_reentrant=False)
    with backend.activate():
        context = OffloadHiddenStates(model, min_offload_size=1, backend=backend)
        check_steps(make_model(), model, around=context)
        assert context.statistics().bytes_offloaded <= 3 * 2 * LAYERS * ROWS * WIDTH * 4


@pytest.mark.field("F11")
@kinds
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_offload_model(kind: str, is_recomputed: bool) -> None:
    """Parameters wait on the host; after an optimizer step the next one is right as well."""
    plain, inner = make_model(), make_model()
    backend = make_backend(kind)
    with backend.activate():
        model = OffloadModel(
            inner,
            backend.device,
            num_slices=2,
            checkpoint_activation=is_recomputed,
            backend=backend,
        )
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
        for number in range(3):
            results = []
            for trained, optimizer in zip((plain, model), optimizers, strict=True):
                x = drawn(ROWS, WIDTH, seed=number).requires_grad_()
                loss = trained(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                results.append([loss, *gradients(x), *trained.parameters()])
            assert_same(results[1], results[0], f"step {number}")


class Body(nn.Module):
    """Layers under a name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x * 2)


@kinds
@pytest.mark.parametrize(("num_resident", "frozen_only"), [(1, True), (2, False)])
def test_offload_layers(kind: str, num_resident: int, frozen_only: bool) -> None:
    plain, backend = Body(), make_backend(kind)
    if frozen_only:
        for block in plain.layers:
            block.up.requires_grad_(False)  # type: ignore[union-attr]
    model = copy.deepcopy(plain)
    with backend.activate():
        with offload_layers(model, "layers", frozen_only, num_resident, backend=backend):
            check_steps(plain, model)
        check_steps(plain, model)  # closed


# With PyTorch's checkpoints


def region(body: Callable[[Tensor], Tensor], x: Tensor, **options: Any) -> Tensor:
    return torch_checkpoint(body, x, use_reentrant=False, **options)


def sines(h: Tensor) -> Tensor:
    return h.mul(2).sin().tanh()


def group_at_the_start(x: Tensor, is_on: bool, **options: Any) -> Tensor:
    return region(lambda h: group(h, sines, is_on).exp().cos(), x, **options)


def group_in_the_middle(x: Tensor, is_on: bool, **options: Any) -> Tensor:
    return region(lambda h: group(h.exp(), sines, is_on).cos().sin(), x, **options)


def two_groups(x: Tensor, is_on: bool, **options: Any) -> Tensor:
    return region(
        lambda h: group(group(h, sines, is_on, "a").exp(), sines, is_on, "b"), x, **options
    )


def nested_regions(x: Tensor, is_on: bool, **options: Any) -> Tensor:
    inner = partial(group_in_the_middle, is_on=is_on, **options)
    return region(lambda h: inner(group(h, sines, is_on, "outer")).cos(), x, **options)


def groups_on_both_sides(x: Tensor, is_on: bool, **options: Any) -> Tensor:
    x = group(x, sines, is_on, "before")
    x = region(lambda h: group(h, sines, is_on, "inside").cos(), x, **options)
    return group(x, sines, is_on, "behind")


def group_around_a_region(x: Tensor, is_on: bool, **options: Any) -> Tensor:
    """The commit inside is not of the group around, which has the same name."""
    inside = partial(group_in_the_middle, is_on=is_on, **options)
    return group(x, lambda h: inside(h.sin()).exp(), is_on)


def context_around(x: Tensor, is_on: bool, **options: Any) -> Tensor:
    if not is_on:
        return region(sines, x.cos(), **options).exp()
    backend = PipelineOffloadManager.get_instance().backend
    with OffloadActivations(min_offload_size=1, max_fwd_stash_size=1, backend=backend):
        return region(sines, x.cos(), **options).exp()


def group_in_a_reentrant_region(x: Tensor, is_on: bool, **options: Any) -> Tensor:
    return torch_checkpoint(lambda h: group(h, sines, is_on).cos(), x, use_reentrant=True)


REGIONS = [
    group_in_a_reentrant_region,
    group_at_the_start,
    two_groups,
    nested_regions,
    groups_on_both_sides,
    group_around_a_region,
    context_around,
]


@pytest.mark.field("F28")
@pytest.mark.parametrize(("kind", "early_stop"), [("late", True), ("threads", False)])
@pytest.mark.parametrize("program", REGIONS)
def test_groups_and_checkpoint_regions(
    kind: str, early_stop: bool, program: Callable[..., Tensor]
) -> None:
    """Gradients are right; whether a group inside a region offloads is not said."""

    def run(is_on: bool) -> list[Tensor]:
        x = drawn(ROWS, WIDTH).requires_grad_()
        h = program(x * 3, is_on, early_stop=early_stop)
        h = program(h, is_on, early_stop=early_stop)
        h.square().sum().backward()
        return gradients(x)

    expected = run(False)
    with session(kind) as manager:
        for number in range(3):
            begin_step()
            assert_same(run(True), expected, f"step {number}")
            assert_idle(manager)
