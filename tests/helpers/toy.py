"""Small models with engine markers, and steps of them with and without offload.

net = Net()
train(net, inputs(4), is_on=True, ahead=2)    # 1F1B with two forwards before the first backward
check_steps(manager, program)      # program(is_on, step) runs one step and returns tensors
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from helpers.sessions import assert_idle, begin_microbatch, drawn, gradients, group, session
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    OffloadActivations,
    PipelineOffloadManager,
    fine_grained_offloading_backward_record,
)
from pp_offload.backends import CpuBackend
from pp_offload.testing import SimulatedBackend


class AwayBackend(CpuBackend):
    """Threads that copy, for what is taken for an accelerator: a disk tier has to stage."""

    def __init__(self) -> None:
        super().__init__(inline_bytes=0)
        self.is_host = False


class Layer(nn.Module):
    """Attention-like and MLP-like parts, each a group if named in ``groups``."""

    def __init__(self, width: int, groups: Sequence[str]) -> None:
        super().__init__()
        self.groups = groups
        self.mix = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        is_mix, is_mlp = "mix" in self.groups, "mlp" in self.groups
        x = x + group(x, lambda h: torch.tanh(self.mix(h)).sin(), is_mix, "mix")
        return x + group(x, lambda h: self.down(torch.sigmoid(self.up(h))), is_mlp, "mlp")


def make_model(
    layers: int = 3, width: int = 8, groups: Sequence[str] = ("mix", "mlp"), device: str = "cpu"
) -> nn.Sequential:
    """The same weights every time."""
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(*(Layer(width, groups) for _ in range(layers)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model.to(device)


def moved(model: nn.Module, device: torch.device) -> nn.Module:
    """``model.to(device)``, with weights that are shared still shared.

    PyTorch sees to that for the devices it knows. On that of a plug-in each use of a parameter
    becomes one of its own, unless it is asked to exchange what is inside.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def batches(num: int, width: int = 8, step: int = 0, length: int = 5) -> list[Tensor]:
    """Inputs of one step, the same every time."""
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(length, width, generator=generator) for _ in range(num)]


def run_step(
    model: nn.Module, inputs: Sequence[Tensor], *, in_flight: int = 1, offload: bool = True
) -> list[Tensor]:
    """One step in 1F1B order with ``in_flight`` forwards ahead; losses and all gradients."""
    return train(model, inputs, offload, ahead=in_flight)


def same_bits(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Whether all tensors are equal bit for bit."""
    return len(first) == len(second) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        for a, b in zip(first, second, strict=True)
    )


def repeated(run: Callable[[], Sequence[Tensor]], *, most: int = 4) -> Sequence[Tensor]:
    """What a plain run comes to, once two in a row agree bit for bit: what to compare with.

    A model of another library may have state that outlives a run (a config that the trainer
    writes to, a cache, a kernel chosen by a measurement).
    """
    results = run()
    for _ in range(most - 1):
        before, results = results, run()
        if same_bits(before, results):
            return results
    raise AssertionError(f"of {most} runs without offload no two in a row are equal bit for bit")


def num_hooks(model: nn.Module) -> int:
    """Around forwards of its modules, and forwards of modules in place of their classes'."""
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return hooks + sum("forward" in vars(module) for module in model.modules())


# A residual net whose parts are groups, and steps of it in pipeline orders


WIDTH = 8
ROWS = 5


class Net(nn.Module):
    """Layers of named parts; the same weights for the same seed."""

    def __init__(self, names: Sequence[str] = ("attn", "mlp"), layers: int = 2, seed: int = 1):
        super().__init__()
        self.is_on = True
        self.names = [name for _ in range(layers) for name in names]
        weights = [drawn(WIDTH, WIDTH, seed=seed * 100 + n) / 2 for n in range(len(self.names))]
        self.weights = nn.ParameterList(weights)

    def forward(self, x: Tensor) -> Tensor:
        for name, weight in zip(self.names, self.weights, strict=True):
            x = x + group(x, lambda h, w=weight: torch.tanh(h @ w).sin(), self.is_on, name)
        return x


def sines(h: Tensor) -> Tensor:
    return h.mul(2).sin().tanh()


class Block(nn.Module):
    """A layer that asks for a checkpoint, if it is to have one, as those of Hugging Face do."""

    gradient_checkpointing = False

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def compute(self, x: Tensor, mask: Tensor | float = 1.0) -> Tensor:
        return x + self.dropout(self.down(torch.sigmoid(self.up(x * mask))))

    def forward(self, x: Tensor, *mask: Tensor) -> Tensor:
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(self.compute, x, *mask)
        return self.compute(x, *mask)


def inputs(num: int, *, step: int = 0, rows: int = ROWS) -> list[Tensor]:
    """Of one step."""
    return [drawn(rows, WIDTH, seed=1000 * step + n) for n in range(num)]


def train(
    stages: nn.Module | Sequence[nn.Module],
    xs: Sequence[Tensor],
    is_on: bool,
    *,
    ahead: int = 1,
    last_first: bool = False,
) -> list[Tensor]:
    """One step over virtual stages; losses, gradients of inputs and of weights.

    So many microbatches go forward ``ahead`` of the first backward, which takes the oldest of them,
    or with ``last_first`` the latest.
    """
    nets = [stages] if isinstance(stages, nn.Module) else list(stages)
    for net in nets:
        net.is_on = is_on  # type: ignore[assignment]
    if is_on:
        off_interface.reset()
    results: list[Tensor] = []
    waiting: list[tuple[list[Tensor], list[Tensor]]] = []

    def backward() -> None:
        leaves, outputs = waiting.pop(-1 if last_first else 0)
        gradient = None
        for leaf, y in zip(reversed(leaves), reversed(outputs), strict=True):
            y.backward(gradient)
            gradient = leaf.grad
        results.extend([outputs[-1].detach(), *gradients(leaves[0])])

    for x in xs:
        leaves: list[Tensor] = []
        outputs: list[Tensor] = []
        for number, net in enumerate(nets):
            begin_microbatch(is_on, len(nets), number)
            leaves.append(x.detach().clone().requires_grad_())
            x = net(leaves[-1])
            if number == len(nets) - 1:
                x = x.square().mean()
            outputs.append(x)
        waiting.append((leaves, outputs))
        del leaves, outputs, x
        if len(waiting) >= ahead:
            backward()
    while waiting:
        backward()
    return results + gradients(*(p for net in nets for p in net.parameters()))


# Steps that are compared on any device, and captures


Compute = Callable[[Tensor], Tensor]


def check_steps(
    engine: PipelineOffloadManager | OffloadActivations,
    program: Callable[[bool, int], Sequence[Tensor]],
    *,
    steps: int = 3,
    moves: bool = True,
) -> None:
    """Each step has the bits of the step without offload, and nothing is in use afterwards.

    ``moves`` says that bytes have to be offloaded.
    """
    for step in range(steps):
        expected = program(False, step)
        if isinstance(engine, PipelineOffloadManager):
            engine.reset()
        assert same_bits(program(True, step), expected), step
        assert_idle(engine)
    assert not moves or engine.statistics().bytes_offloaded > 0


def make_inputs(
    num: int, *, step: int = 0, length: int = 4, width: int = 6, device: object = "cpu"
) -> list[Tensor]:
    """The same for the same arguments."""
    drawn_inputs = [drawn(length, width, seed=1000 * step + n) for n in range(num)]
    return [x.to(torch.device(str(device))) for x in drawn_inputs]


class Event:
    """What the reference gives: recorded on the stream it is told."""

    def record(self, stream: Any) -> None:
        self.at = stream.record_event()


@contextmanager
def manager_of(order: str = "late", **options: Any) -> Iterator[tuple[Any, Any]]:
    device = SimulatedBackend(order)
    with session(device, **options) as manager:
        yield manager, device


def step(net: Net, device: Any = None, *, is_on: bool = True) -> list[Tensor]:
    """Forward and backward of two microbatches; with a device, each is a capture of its own."""
    capture = nullcontext if device is None else device.capture
    net.is_on = is_on
    if is_on:
        off_interface.reset()
    leaves, outputs = inputs(2), []
    for leaf in leaves:
        with capture():
            begin_microbatch(is_on)
            x = leaf.requires_grad_()
            x = fine_grained_offloading_backward_record(x, Event()) if is_on else x
            outputs.append(net(x).square().mean())
            if is_on:
                off_interface.forward_record(Event())
    for y in outputs:
        with capture():
            y.backward()
    return gradients(*leaves, *net.parameters())
