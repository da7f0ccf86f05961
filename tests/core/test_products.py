"""One test of each product on the engine, and groups together with PyTorch's checkpoints."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from helpers.nets import ROWS, WIDTH, Block, sines
from helpers.sessions import assert_idle, assert_same, check, drawn, gradients, group, make_backend
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from pp_offload import (
    OffloadActivations,
    OffloadHiddenStates,
    OffloadModel,
    checkpoint,
    checkpoint_wrapper,
    offload_layers,
)

pytestmark = pytest.mark.smoke

LAYERS = 4


def make_model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(Block() for _ in range(LAYERS)))


Product = Callable[[Any, nn.Sequential], tuple[Any, Any]]
"""Makes of a backend and a model what is called, and a context around each forward, or None."""


def in_a_context(backend: Any, model: nn.Sequential) -> tuple[Any, Any]:
    return model, OffloadActivations(min_offload_size=1, max_fwd_stash_size=5, backend=backend)


def checkpointed(backend: Any, model: nn.Sequential) -> tuple[Any, Any]:
    def run(x: Tensor) -> Tensor:
        for layer in model:
            x = checkpoint(layer, x, offload_inputs=True, min_offload_size=1, backend=backend)
        return x

    return run, None


def wrapped(backend: Any, model: nn.Sequential) -> tuple[Any, Any]:
    wrap = partial(checkpoint_wrapper, offload_to_cpu=True, backend=backend)
    return nn.Sequential(*map(wrap, model)), None


def hidden_states(backend: Any, model: nn.Sequential) -> tuple[Any, Any]:
    for layer in model:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(torch_checkpoint, use_reentrant=False)
    return model, OffloadHiddenStates(model, min_offload_size=1, backend=backend)


def sliced(backend: Any, model: nn.Sequential, is_recomputed: bool = False) -> tuple[Any, Any]:
    options: dict[str, Any] = {"checkpoint_activation": is_recomputed, "backend": backend}
    return OffloadModel(model, backend.device, num_slices=2, **options), None


def streamed(backend: Any, model: nn.Sequential) -> tuple[Any, Any]:
    whole = nn.Sequential(OrderedDict(layers=model))
    offload_layers(whole, "layers", backend=backend)
    return whole, None


PRODUCTS = [
    in_a_context,
    checkpointed,
    wrapped,
    hidden_states,
    sliced,
    partial(sliced, is_recomputed=True),
    streamed,
]


def step(model: nn.Module, run: Any, around: Any) -> list[Tensor]:
    """Losses and gradients of two microbatches in flight, and the parameters behind an update."""
    graphs = []
    for number in range(2):
        x = drawn(ROWS, WIDTH, seed=number).requires_grad_()
        with around or nullcontext():
            graphs.append((x, run(x).square().mean()))
    results: list[Tensor] = []
    for x, loss in graphs:
        loss.backward()
        results += [loss.detach(), *gradients(x)]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    results += gradients(*model.parameters())
    return results + [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.field("F11")
@pytest.mark.parametrize("kind", ["late", "threads"])
@pytest.mark.parametrize("product", PRODUCTS)
def test_steps_are_those_of_the_plain_model(kind: str, product: Product) -> None:
    plain, model, backend = make_model(), make_model(), make_backend(kind)
    with backend.activate():
        run, around = product(backend, model)
        for number in range(3):
            expected = step(plain, plain, None)
            assert_same(step(model, run, around), expected, f"step {number}")
            if around is not None:
                assert around.statistics().bytes_offloaded > 0
                assert_idle(around)


# With PyTorch's checkpoints


def in_the_middle(x: Tensor, group: Any, region: Any) -> Any:
    return region(lambda h: group(h.exp(), sines).cos().sin(), x)


REGIONS: dict[str, Callable[[Tensor, Any, Any], Any]] = {
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
        h = x * 3
        for _ in range(2):
            h = REGIONS[where](h, partial(group, is_on=is_on), region)
        h.square().sum().backward()
        return gradients(x)

    check(run, kind, steps=3, moves=False)
