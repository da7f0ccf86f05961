"""An exception of any kind leaves autograd's stack of hooks at once as it was.

The stack is looked at where the exception has reached the loop, while it is still handled and
keeps all frames alive. Interrupts come from a trace function, at each line of this package's files
that run hooks.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from helpers.injected import Injected, Point, files, interrupt_at, points_in
from helpers.scenarios import begin
from helpers.sessions import group, session
from helpers.toy import same_bits
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import FullACParams, OffloadActivations, offload_modules
from pp_offload import fine_grained_offloading_group_start as group_start
from pp_offload._activations.context import _seeing
from pp_offload._checkpoint.recompute import Recompute
from pp_offload._core.saved import Resident
from pp_offload._hooks.regions import all_packs
from pp_offload._slices.places import Slice
from pp_offload.backends import CpuBackend

WIDTH = 16
Run = Callable[[nn.Module, Tensor], Tensor]


class Layer(nn.Module):
    """Runs its part as ``run`` says."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.run(self.part, x.sin()).exp().tanh()


def plainly(part: nn.Module, x: Tensor) -> Tensor:
    return part(x)


def in_interface(part: nn.Module, x: Tensor) -> Tensor:
    return group(x, lambda x: group(x, part, name="inner").sin(), name="outer")


def in_manager(part: nn.Module, x: Tensor) -> Tensor:
    x = group_start(x, "g")
    with off_interface.get_context(True):
        y = part(x)
    return off_interface.group_commit(y, name="g")


def in_context(offload: OffloadActivations, part: nn.Module, x: Tensor) -> Tensor:
    with offload:
        return part(x)


def of_context() -> OffloadActivations:
    return OffloadActivations(min_offload_size=1, max_fwd_stash_size=1, backend=CpuBackend())


WAYS: dict[str, Callable[[], Run]] = {
    "interface": lambda: in_interface,
    "manager": lambda: in_manager,
    "modules": lambda: plainly,
    "activations": lambda: partial(in_context, of_context()),
    "checkpoint": lambda: Recompute(
        FullACParams(offload_inputs=True, min_offload_size=1), CpuBackend()
    ),
    "group around a checkpoint": lambda: (
        lambda part, x: group(x, partial(checkpoint, part, use_reentrant=False), name="around")
    ),
    "slices": lambda: lambda part, x: Slice("", (), ()).compute((), partial(part, x), (), Resident),
}
CASES = [(way, bool(number % 2)) for number, way in enumerate(WAYS)]
"""Each way, every second inside of hooks of somebody else."""


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


@pytest.mark.parametrize(("way", "has_others"), CASES)
def test_an_interrupt_at_each_line(way: str, has_others: bool) -> None:
    torch.manual_seed(1)
    run = WAYS[way]()
    model = nn.Sequential(Layer(run), Layer(run))

    def forward() -> Tensor:
        off_interface.reset()
        begin()
        x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).requires_grad_()
        return model(x).square().sum()

    def step() -> list[Tensor]:
        loss = forward()
        return [loss.detach(), *torch.autograd.grad(loss, model.parameters())]

    theirs = saved_tensors_hooks(lambda x: x.detach(), lambda x: x) if has_others else nullcontext()
    groups = {"layer": "*", "part": "*.part"}
    with session(CpuBackend()):
        handle = offload_modules(model, groups) if way == "modules" else None
        expected = step()
        wrong = []
        with theirs:
            before = all_packs()
            points = places(forward)
            for point in points:
                try:
                    with interrupt_at(point.number, FILES):
                        forward()
                except Injected:
                    if all_packs() != before:
                        wrong.append(str(point))
                        while len(all_packs()) > len(before):
                            torch._C._autograd._pop_saved_tensors_default_hooks()
                assert same_bits(step(), expected), str(point)
        assert len(points) > 10 and not wrong, wrong
        assert same_bits(step(), expected)
        assert not _seeing, "modules are met for a context that nobody is in, which it keeps alive"
        del handle


MODES = torch.autograd.grad_mode.__file__


class Returns:
    """Raises where the ``number``-th function of PyTorch's grad modes that a hook calls returns."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.has_raised = False

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        caller = frame.f_back
        is_called_here = caller is not None and "pp_offload" in caller.f_code.co_filename
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
    context, layer = of_context(), Layer(plainly)
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
