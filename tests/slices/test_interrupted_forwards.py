"""Whatever line of a forward an interrupt hits, parameters are where they were, and no hook stays.

While a layer computes, tensors on the device stand where its parameters are. Were one left there,
an optimizer would change parameters that no forward uses any more, and nothing would say so.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any

import pytest
import torch
import torch.autograd.graph
import torch.nn.utils.stateless
from conftest import make_backend
from field_checks import hook_depth
from injected import Injected, Point, chosen, files, interrupt_at, points_in
from sliced import inputs_for, state
from torch import Tensor, nn
from torch.nn.utils import _named_member_accessor
from toy import assert_no_hooks, same_bits

from pp_offload import OffloadModel, offload_layers
from pp_offload._slices.stand_ins import Exchange
from pp_offload.backends import Backend

WIDTH = 8
"""Of what :func:`inputs_for` makes."""

TORCH = [torch.autograd.graph, torch.nn.utils.stateless, _named_member_accessor]
"""What PyTorch exchanges hooks and parameters with."""

PATHS = frozenset(str(one.__file__) for one in TORCH) | files(
    *(f"_slices/{name}" for name in ("layers", "places", "recurrent", "streamed_forward")),
    "_slices/stand_ins",
    *(
        f"_slices/{name}"
        for name in ("cache", "running", "gradients", "layer_stream", "saved_parameters")
    ),
    "offload_model",
)
KINDS = ["cpu", "late", "random"]


class Recurrent(nn.Module):
    """Keeps a list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.rnn(x.unsqueeze(0))[0]  # of one step, which is soon done
        return y.squeeze(0)


class Inside(nn.Linear):
    """Checkpoints what is inside of it, as layers of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self._gradient_checkpointing_func: Any = _call

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self._gradient_checkpointing_func(super().forward, x)
        return y


def _call(inside: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return inside(x)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(Inside(), Recurrent(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.layers[2].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


def in_slices(backend: Backend, **options: Any) -> nn.Module:
    return OffloadModel(Stack().layers, backend.device, num_slices=2, backend=backend, **options)


def on_host(backend: Backend) -> nn.Module:
    model = Stack()
    offload_layers(model, "layers", backend=backend)
    return model


def run_again(backend: Backend) -> nn.Module:
    return in_slices(backend, checkpoint_activation=True)


def in_microbatches(backend: Backend) -> nn.Module:
    return in_slices(backend, num_microbatches=2)


Make = Callable[[Backend], nn.Module]

MAKES: list[Make] = [in_slices, in_microbatches, run_again, on_host]


def step(model: nn.Module, backend: Backend, number: int) -> list[Tensor]:
    """The loss and the state after it, on the host."""
    x = inputs_for_device(backend, number)
    loss = model(x).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.5 * parameter.grad
    found = [loss.detach().cpu(), *state(model)]
    model.zero_grad()
    return found


def inputs_for_device(backend: Backend, number: int) -> Tensor:
    (x,) = inputs_for(nn.Linear(1, 1), 1, number)
    return x.detach().to(backend.device).requires_grad_()


def attributes(model: nn.Module) -> list[Any]:
    """Whatever may be exchanged: parameters, lists of RNNs, and functions that checkpoint."""
    found: list[Any] = []
    for module in model.modules():
        found += module._parameters.values()
        named = vars(module)
        found += [named[name] for name in ("_flat_weights", CHECKPOINT) if name in named]
    return found


CHECKPOINT = "_gradient_checkpointing_func"


class Interrupted:
    """A model whose second forward is cut off.

    Args:
        kind: Of the backend.
        make: The model.
    """

    def __init__(self, kind: str, make: Make) -> None:
        self.kind = kind
        self.make = make
        # A checkpoint enters hooks of its own, which PyTorch takes away.
        self.paths = PATHS - {torch.autograd.graph.__file__} if make is run_again else PATHS
        self.expected = self._expected()

    def _expected(self) -> list[list[Tensor]]:
        """What steps come to that nothing interrupts."""
        backend = make_backend(self.kind)
        with backend.activate():
            model = self.make(backend)
            return [step(model, backend, number) for number in range(3)]

    def points(self) -> list[Point]:
        """Lines of the forward."""
        backend = make_backend(self.kind)
        with backend.activate():
            model = self.make(backend)
            step(model, backend, 0)
            return points_in(self.paths, lambda: model(inputs_for_device(backend, 1)))

    def what_is_wrong(self, point: Point) -> str | None:
        """After an interrupt at a line."""
        backend = make_backend(self.kind)
        with backend.activate():
            model = self.make(backend)
            before = attributes(model)
            assert same_bits(step(model, backend, 0), self.expected[0])
            try:
                with interrupt_at(point.number, self.paths):
                    model(inputs_for_device(backend, 1))
            except Injected:
                pass
            else:
                return "no interrupt came through"
            try:
                self._check(model, backend, before)
            except BaseException as error:
                return f"{type(error).__name__}: {str(error)[:150]}"
            finally:
                while hook_depth():
                    torch._C._autograd._pop_saved_tensors_default_hooks()
            return None

    def _check(self, model: nn.Module, backend: Backend, before: list[Any]) -> None:
        assert all(map(is_, attributes(model), before)), "something else stands there"
        assert hook_depth() == 0, "hooks are left"
        for number in (1, 2):
            assert same_bits(step(model, backend, number), self.expected[number]), "wrong bits"
        assert all(map(is_, attributes(model), before)), "something else stands there at the end"
        assert hook_depth() == 0, "hooks are left at the end"

    def check(self, every: int) -> None:
        """Interrupt at every so many of the lines."""
        points = chosen(self.points(), every=every)
        assert len(points) > 100 // every
        found = [(point, self.what_is_wrong(point)) for point in points]
        lines = [f"{point}: {what}" for point, what in found if what is not None]
        if lines:
            text = "\n".join([f"{len(lines)} of {len(points)} lines", *lines])
            pytest.fail(text, pytrace=False)


@pytest.mark.parametrize("every", [pytest.param(6), pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", MAKES)
def test_an_interrupt_at_every_line(kind: str, make: Make, every: int) -> None:
    Interrupted(kind, make).check(every)
    assert_no_hooks()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", MAKES)
def test_what_several_interrupts_leave_is_put_back_by_the_next_forward(
    kind: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come whenever something is about to be put back."""
    expected = Interrupted(kind, make).expected
    backend = make_backend(kind)

    def interrupted(exchange: Exchange) -> None:
        raise Injected

    with backend.activate():
        model = make(backend)
        before = attributes(model)
        assert same_bits(step(model, backend, 0), expected[0])
        with monkeypatch.context() as patch, pytest.raises(Injected):
            patch.setattr(Exchange, "undo", interrupted)
            model(inputs_for_device(backend, 1))
        for number in (1, 2):
            assert same_bits(step(model, backend, number), expected[number])
        assert all(map(is_, attributes(model), before))
    assert_no_hooks()
