"""A context around a compiled model: what a compiler makes of its hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from conftest import make_backend
from helpers.toy import same_bits
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadActivations, offload_modules, use_backend

pytestmark = pytest.mark.filterwarnings("ignore:Using `torch.compile")

WIDTH, ROWS = 12, 5


class Turned(nn.Module):
    """Multiplies with a buffer, which autograd saves, before a norm that has buffers, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("table", torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x.sin() * self.table)).tanh()


def whole(model: nn.Sequential, **options: Any) -> Callable[[Tensor], Tensor]:
    return torch.compile(model, **options)


def parts(model: nn.Sequential, **options: Any) -> Callable[[Tensor], Tensor]:
    return nn.Sequential(*(torch.compile(layer, **options) for layer in model))


def function(model: nn.Sequential, **options: Any) -> Callable[[Tensor], Tensor]:
    return torch.compile(lambda x: model(x).sin(), **options)


def in_place(model: nn.Sequential, **options: Any) -> Callable[[Tensor], Tensor]:
    model.compile(**options)
    return model


WAYS = {way.__name__: way for way in (whole, parts, function, in_place)}


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def train(
    way: Callable[..., Callable[[Tensor], Tensor]],
    context: Callable[[nn.Module], AbstractContextManager[object]],
) -> list[Tensor]:
    """Microbatches of which only the first is compiled; two are in flight."""
    torch.manual_seed(3)
    model = nn.Sequential(*(Turned() for _ in range(3)))
    compute, entered = way(model, backend="aot_eager", fullgraph=True), context(model)
    gradients: list[Tensor] = []
    losses: list[Tensor] = []
    for number in range(12):
        x = torch.randn(ROWS, WIDTH).requires_grad_()
        stance = "fail_on_recompile" if number else "default"
        with torch.compiler.set_stance(stance), entered:
            losses.append(compute(x).square().mean())
        if len(losses) == 2:
            losses[0].backward()
            gradients.append(losses.pop(0).detach())
    losses[0].backward()
    return gradients + [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.quick("whole", "parts")
@pytest.mark.parametrize("name", WAYS)
def test_a_model_is_compiled_once(name: str) -> None:
    """Whole, with fullgraph, and not anew because the next context is another one. Buffers stay,
    whether or not the context was given the model.
    """
    way = WAYS[name]
    expected = train(way, lambda model: nullcontext())
    offloaded_bytes = []
    for is_given in (True, False):
        torch.compiler.reset()
        made = OffloadActivations(
            min_offload_size=1, max_fwd_stash_size=1, backend=make_backend("cpu")
        )

        def context(
            model: nn.Module, made: OffloadActivations = made, is_given: bool = is_given
        ) -> OffloadActivations:
            if is_given:
                made.keep_module(model)
            return made

        assert same_bits(train(way, context), expected)
        offloaded_bytes.append(made.statistics().bytes_offloaded)
        assert not torch_module._global_forward_pre_hooks
    assert offloaded_bytes[0] > 0
    assert offloaded_bytes[0] == offloaded_bytes[1] or way in (function, in_place)


@pytest.mark.parametrize("way", [whole, parts])
def test_one_warning_of_a_model_that_is_compiled_as_a_whole(
    way: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Its backward takes all saved tensors at once; that of a layer those of the layer."""
    model = nn.Sequential(*(Turned() for _ in range(24)))
    compute = way(model, backend="aot_eager")
    offload = OffloadActivations(min_offload_size=1, backend=make_backend("cpu"))
    for _ in range(2):
        with offload:
            loss = compute(torch.randn(ROWS, WIDTH)).square().mean()
        loss.backward()
    warnings = [line for line in caplog.messages if "layer.compile()" in line]
    assert len(warnings) == (way is whole)


def test_a_group_in_a_model_that_is_compiled_as_a_whole_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(*(Turned() for _ in range(2)))
    with use_backend(make_backend("cpu")):
        offload_modules(model, {"layer": "*"})
        compute = torch.compile(model, backend="aot_eager")
        for _ in range(3):
            off_interface.reset()
            off_interface.init_chunk_handler(None, None, 1)
            compute(torch.randn(ROWS, WIDTH)).sum().backward()
        off_interface.reset()
    (warning,) = [line for line in caplog.messages if "group 'layer'" in line]
    assert "compile each of them" in warning
