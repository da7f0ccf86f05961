"""Parameters that a forward did not use: nobody hears of them in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import BACKENDS, make_backend
from helpers.sliced import as_layers, as_slices, run_again
from helpers.toy import moved, same_bits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pp_offload.backends import Backend

WIDTH = 4
KINDS = ["model", "again", "parts", "layers", "checkpointed"]


class Experts(nn.Module):
    """Each row goes to the expert that its first element names; ``spare`` is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.spare = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[int(x[0, 0].detach().abs())](x).sin() + x


def of_kind(kind: str, model: nn.Sequential, backend: Backend) -> nn.Module:
    """The model with its parameters on the host, in one of several ways."""
    if kind.startswith("plain"):
        return moved(model, backend.device)
    if kind in ("layers", "checkpointed"):
        return as_layers(model, backend)[0]
    options: dict[str, Any] = {"num_microbatches": 2} if kind == "parts" else {}
    offload = run_again if kind == "again" else as_slices
    return offload(model, backend, num_slices=2, **options)[0]


def computed(kind: str, model: nn.Module, x: Tensor) -> Tensor:
    """The output; the plain model takes the parts one after the other where the other does."""
    if kind == "plain parts":
        return torch.cat([model(part) for part in x.chunk(2)])
    if kind == "checkpointed":
        for layer in model[0]:  # type: ignore[index]
            x = checkpoint(layer, x, use_reentrant=False)
        return x
    return model(x)


Events = list[tuple[str, Tensor | None]]


class Heard:
    """All hooks that a parameter can have, and what they were given."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.events: Events = []
        parameter.register_hook(lambda gradient: self._note("gradient", gradient))
        accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        accumulator.register_prehook(lambda given: self._note("before", given[0]))
        accumulator.register_hook(lambda *_: self._note("after", None))
        parameter.register_post_accumulate_grad_hook(lambda p: self._note("there", p.grad))
        self._accumulator = accumulator  # which the parameter does not hold

    def _note(self, what: str, tensor: Tensor | None) -> None:
        self.events.append((what, None if tensor is None else tensor.detach().cpu().clone()))


def same_events(first: Events, other: Events) -> bool:
    kinds = [[(what, tensor is None) for what, tensor in events] for events in (first, other)]
    tensors = [[tensor for _, tensor in events if tensor is not None] for events in (first, other)]
    return kinds[0] == kinds[1] and same_bits(*tensors)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Experts(), Experts())


def inputs(step: int, experts: tuple[int, int], device: torch.device) -> Tensor:
    x = torch.rand(4, WIDTH, generator=torch.Generator().manual_seed(step)) / 8
    for number, expert in enumerate(experts):
        x[2 * number, 0] += expert
    return x.to(device)


def plain_of(kind: str) -> str:
    return "plain parts" if kind == "parts" else "plain"


Backward = Callable[[nn.Module, Tensor], object]


def by_backward(model: nn.Module, loss: Tensor) -> None:
    loss.backward()


def twice(model: nn.Module, loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def towards_some(model: nn.Module, loss: Tensor) -> list[Tensor | None]:
    """Hooks of tensors are called here as well; those of accumulators are not."""
    wanted = [*model.parameters()][::2]
    return list(torch.autograd.grad(loss, wanted, allow_unused=True))


@pytest.mark.parametrize("backward", [by_backward, twice, towards_some])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", BACKENDS)
def test_hooks_are_called_as_of_the_plain_model(device: str, kind: str, backward: Backward) -> None:
    """Each as often, with the same values; and who has no gradient has none."""
    results = []
    for way in (plain_of(kind), kind):
        backend = make_backend(device)
        with backend.activate():
            model = of_kind(way, layers(), backend)
            listeners = [Heard(parameter) for parameter in model.parameters()]
            grads: list[Tensor | None] = []
            for step, experts in enumerate([(0, 0), (1, 2), (1, 1), (2, 0)]):
                x = inputs(step, experts, backend.device)
                gradients = backward(model, computed(way, model, x).square().sum())
                grads += gradients if isinstance(gradients, list) else []
            grads += [parameter.grad for parameter in model.parameters()]
            on_host = [None if gradient is None else gradient.detach().cpu() for gradient in grads]
            results.append(([listener.events for listener in listeners], on_host))
            for parameter in model.parameters():
                parameter.grad = None  # a gradient with a graph refers to its parameter
    (plain_heard, plain), (model_heard, grads) = results
    assert all(map(same_events, model_heard, plain_heard))
    assert same_events(
        [("", gradient) for gradient in grads], [("", gradient) for gradient in plain]
    )
    assert any(gradient is None for gradient in grads), "nobody used the spare ones"
