"""A context around a compiled model: what a compiler makes of its hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from conftest import make_backend
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from toy import same_bits

from pp_offload import OffloadActivations
from pp_offload._activations.met_modules import MetModules

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


def parts_in_place(model: nn.Sequential, **options: Any) -> Callable[[Tensor], Tensor]:
    for layer in model:
        layer.compile(**options)
    return model


WAYS = {way.__name__: way for way in (whole, parts, function, in_place, parts_in_place)}


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
    found: list[Tensor] = []
    losses: list[Tensor] = []
    for number in range(12):
        x = torch.randn(ROWS, WIDTH).requires_grad_()
        stance = "fail_on_recompile" if number else "default"
        with torch.compiler.set_stance(stance), entered:
            losses.append(compute(x).square().mean())
        if len(losses) == 2:
            losses[0].backward()
            found.append(losses.pop(0).detach())
    losses[0].backward()
    return found + [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("is_told", [True, False], ids=["told", "not told"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_model_is_compiled_once(way: Callable[..., Any], is_told: bool) -> None:
    """Whole, with fullgraph, and not anew because the next context is another one."""
    made = OffloadActivations(min_offload_size=1, max_fwd_stash_size=1, backend=make_backend("cpu"))

    def context(model: nn.Module) -> OffloadActivations:
        if is_told:
            made.keep_module(model)
        return made

    expected = train(way, lambda model: nullcontext())
    torch.compiler.reset()
    assert same_bits(train(way, context), expected)
    assert made.statistics().bytes_offloaded > 0
    assert not torch_module._global_forward_pre_hooks


@pytest.mark.parametrize("way", [whole, parts])
def test_buffers_in_a_compiled_module_stay(way: Callable[..., Any]) -> None:
    offloaded = []
    for is_told in (True, False):
        torch.compiler.reset()
        made = OffloadActivations(
            min_offload_size=1, max_fwd_stash_size=1, backend=make_backend("cpu")
        )

        def context(model: nn.Module, made: OffloadActivations = made, told: bool = is_told) -> Any:
            if told:
                made.keep_module(model)
            return made

        train(way, context)
        offloaded.append(made.statistics().bytes_offloaded)
    assert offloaded[0] == offloaded[1] > 0


def test_code_compiled_outside_of_a_context_is_right_inside() -> None:
    """And the other way round: it is made once for each at most."""
    torch.manual_seed(3)
    model = nn.Sequential(*(Turned() for _ in range(2)))
    compute = torch.compile(model, backend="aot_eager", fullgraph=True)
    made = OffloadActivations(min_offload_size=1, max_fwd_stash_size=1, backend=make_backend("cpu"))
    for number in range(8):
        torch.manual_seed(number)
        x = torch.randn(ROWS, WIDTH)
        found = []
        for entered in (made, nullcontext()):
            model.zero_grad()
            stance = "fail_on_recompile" if number else "default"
            with torch.compiler.set_stance(stance), entered:
                loss = compute(x).square().mean()
            loss.backward()
            found.append(
                [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
            )
        assert same_bits(*found)
    assert made.statistics().bytes_offloaded > 0


def test_two_contexts_see_modules_until_each_is_left() -> None:
    """In any order: on two threads, the first to begin may be the first to end."""
    seen: list[tuple[int, nn.Module]] = []
    layer = nn.Tanh()
    for order in ((0, 1), (1, 0)):
        both = [MetModules(lambda module, number=n: seen.append((number, module))) for n in (0, 1)]
        for met in both:
            met.begin()
        layer(torch.ones(2))
        both[order[0]].end()
        layer(torch.ones(2))
        both[order[1]].end()
        layer(torch.ones(2))
        assert seen == [(0, layer), (1, layer), (order[1], layer)]
        assert not torch_module._global_forward_pre_hooks
        seen.clear()
