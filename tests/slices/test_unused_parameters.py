"""Parameters that a forward did not use: nobody hears of them in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.sliced import as_layers, as_slices, run_again
from helpers.toy import moved
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pp_offload.backends import Backend

WIDTH = 4


class Experts(nn.Module):
    """Each row goes to the expert that its first element names; ``spare`` is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.spare = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[int(x[0, 0].detach().abs())](x).sin() + x


OFFLOADS: dict[str, Callable[[nn.Sequential, Backend], Any]] = {
    "slices": lambda model, backend: as_slices(model, backend, num_slices=2),
    "again": lambda model, backend: run_again(model, backend, num_slices=2),
    "parts": lambda model, backend: as_slices(model, backend, num_slices=2, num_microbatches=2),
    "layers": as_layers,
    "checkpointed": as_layers,
}


def bits(tensor: Tensor | None) -> bytes | None:
    return None if tensor is None else tensor.detach().cpu().numpy().tobytes()


def listen(parameter: nn.Parameter, events: list[Any]) -> Any:
    """Note whatever hooks a parameter can have are given."""
    parameter.register_hook(lambda gradient: events.append(("gradient", bits(gradient))))
    accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    accumulator.register_prehook(lambda given: events.append(("before", bits(given[0]))))
    accumulator.register_hook(lambda *_: events.append(("after", None)))
    parameter.register_post_accumulate_grad_hook(lambda p: events.append(("there", bits(p.grad))))
    return accumulator  # which the parameter does not hold


Backward = Callable[[nn.Module, Tensor], object]


def by_backward(model: nn.Module, loss: Tensor) -> None:
    loss.backward()


def twice(model: nn.Module, loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def towards_some(model: nn.Module, loss: Tensor) -> list[bytes | None]:
    """Hooks of tensors are called here as well; those of accumulators are not."""
    wanted = [*model.parameters()][::2]
    return [bits(gradient) for gradient in torch.autograd.grad(loss, wanted, allow_unused=True)]


def run(kind: str, backend: Backend, backward: Backward, is_on: bool) -> tuple[Any, list[Any]]:
    """Events of each parameter, and gradients; None where there is none."""
    torch.manual_seed(0)
    layers = nn.Sequential(Experts(), Experts())
    model = OFFLOADS[kind](layers, backend)[0] if is_on else moved(layers, backend.device)
    events: list[list[Any]] = [[] for _ in model.parameters()]
    accumulators = [*map(listen, model.parameters(), events)]
    gradients: list[Any] = []
    for step, experts in enumerate([(0, 0), (1, 2), (1, 1), (2, 0)]):
        x = torch.rand(4, WIDTH, generator=torch.Generator().manual_seed(step)) / 8
        for number, expert in enumerate(experts):
            x[2 * number, 0] += expert
        x = x.to(backend.device)
        if kind == "parts" and not is_on:
            x = torch.cat([model(part) for part in x.chunk(2)])
        elif kind == "checkpointed" and is_on:
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=False)
        else:
            x = model(x)
        gradients.append(backward(model, x.square().sum()))
    gradients += [bits(parameter.grad) for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None  # a gradient with a graph refers to its parameter
    del accumulators
    return events, gradients


@pytest.mark.parametrize("backward", [by_backward, twice, towards_some])
@pytest.mark.parametrize("kind", OFFLOADS)
def test_hooks_are_called_as_of_the_plain_model(
    active: Backend, kind: str, backward: Backward
) -> None:
    """Each as often, with the same values; and who has no gradient has none."""
    events, gradients = run(kind, active, backward, is_on=True)
    assert (events, gradients) == run(kind, active, backward, is_on=False)
    assert any(events) and None in gradients[4:], "nobody used the spare ones"
