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
    check,
    drawn,
    gradients,
    group,
    make_backend,
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


def sines(h: Tensor) -> Tensor:
    return h.mul(2).sin().tanh()


def in_the_middle(x: Tensor, group: Any, region: Any) -> Any:
    return region(lambda h: group(h.exp(), sines).cos().sin(), x)


REGIONS: dict[str, Callable[[Tensor, Any, Any], Any]] = {
    "reentrant": lambda x, group, _: torch_checkpoint(
        lambda h: group(h, sines).cos(), x, use_reentrant=True
    ),
    "at the start": lambda x, group, region: region(lambda h: group(h, sines).exp().cos(), x),
    "two groups": lambda x, group, region: region(
        lambda h: group(group(h, sines, name="a").exp(), sines, name="b"), x
    ),
    "nested": lambda x, group, region: region(
        lambda h: in_the_middle(group(h, sines, name="outer"), group, region).cos(), x
    ),
    "on both sides": lambda x, group, region: group(
        region(lambda h: group(h, sines, name="inside").cos(), group(x, sines, name="before")),
        sines,
        name="behind",
    ),
    "around": lambda x, group, region: group(
        x, lambda h: in_the_middle(h.sin(), group, region).exp()
    ),
    "in a context": lambda x, _, region: region(sines, x.cos()).exp(),
}
"""Where groups are. The commit inside is not of the group around, which has the same name."""


@pytest.mark.field("F28")
@pytest.mark.parametrize(("kind", "early_stop"), [("late", True), ("threads", False)])
@pytest.mark.parametrize("where", REGIONS)
def test_groups_and_checkpoint_regions(kind: str, early_stop: bool, where: str) -> None:
    """Gradients are right; whether a group inside a region offloads is not said."""
    region = partial(torch_checkpoint, use_reentrant=False, early_stop=early_stop)

    def run(is_on: bool) -> list[Tensor]:
        x = drawn(ROWS, WIDTH).requires_grad_()
        context: Any = nullcontext()
        if is_on and where == "in a context":
            backend = PipelineOffloadManager.get_instance().backend
            context = OffloadActivations(min_offload_size=1, max_fwd_stash_size=1, backend=backend)
        h = x * 3
        for _ in range(2):
            with context:
                h = REGIONS[where](h, partial(group, is_on=is_on), region)
        h.square().sum().backward()
        return gradients(x)

    check(run, kind, steps=3, moves=False)
