"""An exception of any kind leaves autograd's stack of hooks at once as it was.

The stack is looked at where the exception has reached the loop, while it is still handled and
keeps all frames alive. Interrupts come from a trace function, at each line of this package's files
that run hooks.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from conftest import make_backend
from helpers.injected import Injected, Point, files, interrupt_at, points_in
from helpers.toy import same_bits
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    FullACParams,
    OffloadActivations,
    OffloadConfig,
    offload_modules,
    use_backend,
)
from pp_offload import fine_grained_offloading_group_start as group_start
from pp_offload._activations.context import _seeing
from pp_offload._checkpoint.recompute import Recompute
from pp_offload._core.saved import Resident
from pp_offload._hooks.regions import all_packs
from pp_offload._slices.places import Slice

CONFIG = OffloadConfig(min_offloaded_tensor_size=1)
WIDTH = 16


class Layer(nn.Module):
    """Runs its part as ``run`` says."""

    def __init__(self) -> None:
        super().__init__()
        self.run: Callable[..., Tensor] = plainly
        self.part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.run(self.part, x.sin()).exp().tanh()


def plainly(part: nn.Module, x: Tensor) -> Tensor:
    return part(x)


def in_interface(part: nn.Module, x: Tensor) -> Tensor:
    with off_interface(True, x, "outer"):
        with off_interface(True, x, "inner"):
            y = part(x)
        y = off_interface.group_commit(y, name="inner").sin()
    return off_interface.group_commit(y, name="outer")


def in_manager(part: nn.Module, x: Tensor) -> Tensor:
    x = group_start(x, "g")
    with off_interface.get_context(True):
        y = part(x)
    return off_interface.group_commit(y, name="g")


def in_activations(offload: OffloadActivations, part: nn.Module, x: Tensor) -> Tensor:
    with offload:
        return part(x)


def in_torchs(part: nn.Module, x: Tensor) -> Tensor:
    with off_interface(True, x, "around"):
        y = checkpoint(part, x, use_reentrant=False)
    return off_interface.group_commit(y, name="around")


class Program:
    """Steps of a model, with what offloads it."""

    def __init__(self, way: str) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(Layer(), Layer())
        self.handle: Any = None
        cpu = make_backend("cpu")
        if way == "modules":
            self.handle = offload_modules(self.model, {"layer": "*", "part": "*.part"})
        offload = OffloadActivations(min_offload_size=1, max_fwd_stash_size=2, backend=cpu)
        params = FullACParams(offload_inputs=True, min_offload_size=1)
        runs: dict[str, Callable[..., Tensor]] = {
            "interface": in_interface,
            "manager": in_manager,
            "modules": plainly,
            "activations": partial(in_activations, offload),
            "checkpoint": Recompute(params, cpu),
            "group around a checkpoint": in_torchs,
            "slices": lambda part, x: Slice("", (), ()).compute((), partial(part, x), (), Resident),
        }
        for layer in self.model:
            layer.run = runs[way]

    def forward(self) -> Tensor:
        off_interface.reset()
        off_interface.init_chunk_handler(None, None, 1)
        x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).requires_grad_()
        return self.model(x).square().sum()

    def step(self) -> list[Tensor]:
        loss = self.forward()
        return [loss.detach(), *torch.autograd.grad(loss, self.model.parameters())]


WAYS = [
    "interface",
    "manager",
    "modules",
    "activations",
    "checkpoint",
    "group around a checkpoint",
    "slices",
]


CASES = [(way, number % 2) for number, way in enumerate(WAYS)]
"""Each way, every second inside of hooks of somebody else."""


@contextmanager
def theirs(num: int) -> Iterator[None]:
    """Hooks of somebody else, around everything."""
    if num == 0:
        yield
        return
    with saved_tensors_hooks(lambda x: x.detach(), lambda x: x), theirs(num - 1):
        yield


@pytest.fixture(autouse=True)
def hooks_of_this_test_only() -> Iterator[None]:
    assert all_packs() == []
    yield
    while all_packs():
        torch._C._autograd._pop_saved_tensors_default_hooks()


FILES = files(
    *("_hooks/hook_scopes", "_hooks/regions", "_megatron/interface", "_megatron/manager"),
    *("_activations/context", "_checkpoint/recompute", "modules"),
)


def places(run: Callable[[], object]) -> list[Point]:
    """Where a signal handler might raise: each line, the first and second time it is reached."""
    visits: Counter[tuple[str, int]] = Counter()
    points = []
    for point in points_in(FILES, run):
        visits[point.file, point.line] += 1
        if visits[point.file, point.line] <= 2:
            points.append(point)
    return points


@pytest.mark.parametrize(("way", "depth"), CASES)
def test_an_interrupt_at_each_line(way: str, depth: int) -> None:
    with use_backend(make_backend("cpu"), config=CONFIG):
        program = Program(way)
        expected = program.step()
        wrong = []
        with theirs(depth):
            before = all_packs()
            points = places(program.forward)
            for point in points:
                try:
                    with interrupt_at(point.number, FILES):
                        program.forward()
                except Injected:
                    if all_packs() != before:
                        wrong.append(str(point))
                        while len(all_packs()) > depth:
                            torch._C._autograd._pop_saved_tensors_default_hooks()
                assert same_bits(program.step(), expected), str(point)
        assert len(points) > 10 and not wrong, wrong
        assert same_bits(program.step(), expected)
        assert not _seeing, "modules are met for a context that nobody is in, which it keeps alive"


MODES = torch.autograd.grad_mode.__file__


class Returns:
    """Raises where the ``number``-th function of PyTorch's grad modes that a hook calls returns."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.has_raised = False

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        is_called_here = (
            frame.f_back is not None and "pp_offload" in frame.f_back.f_code.co_filename
        )
        return self._line if frame.f_code.co_filename == MODES and is_called_here else None

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "return":
            self.number -= 1
            if self.number < 0 and not self.has_raised:
                self.has_raised = True
                raise KeyboardInterrupt
        return self._line


def test_an_interrupt_in_a_grad_mode_of_pytorch_leaves_grad_on() -> None:
    """Inside hooks grad is off, and host memory is taken there."""
    context = OffloadActivations(
        min_offload_size=1, max_fwd_stash_size=1, backend=make_backend("cpu")
    )
    layer = Layer()
    number, interrupted = 0, True
    while interrupted:
        returns = Returns(number)
        sys.settrace(returns)
        try:
            with context:
                layer(torch.randn(4 + number, WIDTH)).sum()  # another size takes other memory
        except KeyboardInterrupt:
            pass  # drops the traceback, and what its frames hold
        finally:
            sys.settrace(None)
        was_on = torch.is_grad_enabled()
        torch.set_grad_enabled(True)  # for the tests behind this one
        assert was_on
        number, interrupted = number + 1, returns.has_raised
