"""F47: no byte of a parameter or buffer moves, whichever view of it autograd saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import on_two_backends, skip_on_emulated
from field_checks import make_inputs
from torch import Tensor, nn
from toy import assert_idle, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import PipelineOffloadManager, offload_modules

pytestmark = pytest.mark.field("F47")


class Tied(nn.Module):
    """Logits by the weights of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.detach().abs() * 3).long().clamp(max=6)[:, 0]
        return self.head(torch.tanh(self.embedding(tokens) + x)).sin()


class WithBuffers(nn.Module):
    """Multiplies by a buffer, a slice and a transpose of one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(-1, 1, 36).view(6, 6))
        self.register_buffer("scale", torch.linspace(1, 2, 12))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.table.t()).sin() * self.scale[6:] * self.table[2]


class Views(nn.Module):
    """Views of one flat parameter, as sharding libraries make them."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.linspace(-1, 1, 72))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.flat.detach().view(2, 6, 6).requires_grad_().unbind()
        up, down = self.flat[:36].view(6, 6), self.flat[36:].view(6, 6)
        return torch.tanh(x @ up.t() @ first) @ down * second.sum()


def convolution() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4), nn.Tanh())


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(6, 8), nn.Sigmoid(), nn.Linear(8, 6)),
    "norms": lambda: nn.Sequential(nn.LayerNorm(6), nn.RMSNorm(6), nn.PReLU(6), nn.BatchNorm1d(6)),
    "convolution": convolution,
    "tied": Tied,
    "buffers": WithBuffers,
    "views": Views,
    "gru": lambda: nn.GRUCell(6, 6),
}


def storages(model: nn.Module) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}


@pytest.fixture
def moved(manager: PipelineOffloadManager, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Addresses of the storages of all saved tensors whose bytes went to the host."""
    engine, seen = manager.offloader.engine, []
    send = engine.send

    def spy(group: Any, payloads: Any) -> None:
        seen.extend(tensor.untyped_storage().data_ptr() for tensor in payloads.tensors)
        send(group, payloads)

    monkeypatch.setattr(engine, "send", spy)
    yield seen


@on_two_backends
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("way", ["add_module", "offload_modules"])
def test_nothing_of_the_model_moves(
    manager: PipelineOffloadManager,
    moved: list[int],
    make: Callable[[], nn.Module],
    way: str,
) -> None:
    device = manager.backend.device
    if make is MODULES["gru"]:
        skip_on_emulated(manager.backend, "a GRU is one kernel there, which it has not")

    def build() -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(make()).to(device)

    on, off = build(), build()
    if way == "add_module":
        manager.offloader.engine.eligibility.kept.add_module(on)
    else:
        offload_modules(on, {"part": "*"})

    def run(model: nn.Module, step: int) -> list[Tensor]:
        x = make_inputs(1, step=step, device=device)[0].requires_grad_()
        h = x * 2
        if model is off:
            y = off(h)
        else:
            manager.reset()
            manager.init_model_chunk_offload_handler(None, None, 1)
            if way == "add_module":
                with off_interface(True, h, "part") as marked:
                    y = on(marked)
                y = off_interface.group_commit(y, name="part")
            else:
                y = on(h)
        y.square().sum().backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        return [y.detach(), x.grad, *gradients, *model.buffers()]

    for step in range(2):
        assert same_bits(run(on, step), run(off, step)), step
        assert_idle(manager)
    assert moved
    assert not storages(on) & set(moved)


@on_two_backends
def test_linear_without_being_told(manager: PipelineOffloadManager, moved: list[int]) -> None:
    """A view of a Parameter is known by what it is a view of; one group moves its input only."""
    device = manager.backend.device
    model = nn.Linear(6, 6).to(device)
    (x,) = make_inputs(1, device=device)
    manager.reset()
    manager.init_model_chunk_offload_handler(None, None, 1)
    h = x.requires_grad_() * 2
    with off_interface(True, h, "linear") as marked:
        y = model(marked)
    off_interface.group_commit(y, name="linear").sum().backward()
    del y, marked
    assert not storages(model) & set(moved)
    assert manager.statistics().bytes_offloaded == h.nbytes
    assert_idle(manager)


@on_two_backends
@pytest.mark.parametrize("is_parameter", [True, False])
def test_marks_hold_for_views(
    manager: PipelineOffloadManager, moved: list[int], is_parameter: bool
) -> None:
    device = manager.backend.device
    weight = torch.linspace(0, 1, 36, device=device).view(6, 6).requires_grad_()
    marked_one = nn.Parameter(weight.detach()) if is_parameter else weight
    off_interface.mark_not_offloadable(marked_one)
    manager.reset()
    manager.init_model_chunk_offload_handler(None, None, 1)
    (x,) = make_inputs(1, device=device)
    h = x.requires_grad_() * 2
    with off_interface(True, h, "a") as h:
        y = (h @ marked_one.t()) * marked_one.detach()[1:5].sum(0) + marked_one[2:].sin().sum()
    off_interface.group_commit(y, name="a").sum().backward()
    del y, h
    assert marked_one.untyped_storage().data_ptr() not in moved
    assert moved
    assert_idle(manager)
