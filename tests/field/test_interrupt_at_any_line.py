"""F57: whatever line an interrupt hits, no hook stays, and the next steps are right.

A step of two microbatches is cut off at every line of the engine by an exception that nobody
expects, as the handler of a signal may raise it anywhere.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import make_backend
from field_checks import hook_depth
from injected import Injected, Point, chosen, files, interrupt_at, points_in
from test_split import MICROBATCHES, tell
from test_split import run_step as run_in_parts
from threaded import KINDS, Net, assert_all_idle, gradients, input_of, manager_of, plain
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from toy import assert_idle, assert_no_hooks, batches, make_model, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, PipelineOffloadManager, offload_modules, use_backend
from pp_offload._core.saved import Saved as SavedActivation

pytestmark = pytest.mark.field("F57")

ENGINE = files(
    "_transfer/engine",
    "_transfer/outgoing",
    "_transfer/host_tier",
    "_transfer/copies",
    "_transfer/ticket",
    "_transfer/in_flight",
    "_transfer/pending_reloads",
    "_transfer/saved_tensor",
    "_transfer/deduplication",
    "_transfer/payload",
    "_groups/prefetch",
    "_groups/split_backward",
)
STEPS = files(
    *(f"_groups/{name}" for name in ("chunk", "offloader", "group")),
    *(f"_steps/{name}" for name in ("step", "manager")),
    "_steps/chunk_queue",
    *(f"_megatron/{name}" for name in ("chunk", "group", "manager", "interface")),
)
PARTS = files(
    *(f"_groups/{name}" for name in ("split_backward", "prefetch")),
    *(f"_steps/{name}" for name in ("step", "manager")),
    "_steps/chunk_queue",
)

CONFIG = OffloadConfig(min_offloaded_tensor_size=1)

planned = cache(plain)


@pytest.fixture(autouse=True)
def hooks_of_this_test_only() -> Iterator[None]:
    """What one test leaves behind is not found by the next."""
    assert hook_depth() == 0
    yield
    drop_hooks()


def drop_hooks() -> None:
    while hook_depth():
        torch._C._autograd._pop_saved_tensors_default_hooks()


def step(manager: PipelineOffloadManager, number: int) -> list[Tensor]:
    """Two forwards, then two backwards; gradients of both."""
    manager.reset()
    graphs = []
    for seed in range(2):
        off_interface.init_chunk_handler(None, None, 1)
        model, leaf = Net(seed), input_of(seed, number).requires_grad_()
        graphs.append((model, leaf, model(leaf).square().mean()))
    found = []
    for model, leaf, loss in graphs:
        loss.backward()
        found += gradients(model, leaf)
    return found


def expected(number: int) -> list[Tensor]:
    """The gradients of :func:`step` without offload."""
    return [gradient for seed in range(2) for gradient in planned(seed, seed, number)]


DELAY = 1
"""How far the second part of a backward is behind the first, in microbatches."""


def step_in_parts(manager: PipelineOffloadManager, number: int) -> list[Tensor]:
    """Six microbatches, the backward of each in two parts."""
    if manager.offloader.split is None:
        tell(manager, DELAY)
    return run_in_parts(make_model(layers=2), batches(MICROBATCHES, step=number), DELAY, manager)


@cache
def expected_in_parts(number: int) -> list[Tensor]:
    """The gradients of :func:`step_in_parts` without offload."""
    model = make_model(layers=2, groups=())
    return run_in_parts(model, batches(MICROBATCHES, step=number), DELAY, None)


@dataclass(frozen=True)
class Program:
    """What is interrupted."""

    step: Callable[[PipelineOffloadManager, int], list[Tensor]]
    """Makes the gradients of one step."""

    expected: Callable[[int], list[Tensor]]
    """The same without offload."""

    paths: frozenset[str]
    """Where it is interrupted."""

    is_freed: bool = True
    """Whether PyTorch lets go of an interrupted graph: a backward in parts leaves hooks in it."""

    def what_is_wrong(self, kind: str, directory: Path, point: Point) -> str | None:
        """After an interrupt at ``point`` of the second step."""
        with manager_of(kind, directory, window_bytes=4096) as manager:
            self.step(manager, 0)
            try:
                with interrupt_at(point.number, self.paths) as interrupt:
                    self.step(manager, 1)
            except Injected:
                pass  # as long as it is handled, it holds the graphs
            else:
                # Copies end sooner or later, so not every run is of the same length.
                return None if interrupt.at is None else "the exception is lost"
            gc.collect()
            return self._what_is_left(manager)

    def _what_is_left(self, manager: PipelineOffloadManager) -> str | None:
        try:
            manager.reset()
            assert hook_depth() == 0, "hooks are left"
            for number in (2, 3):
                assert same_bits(self.step(manager, number), self.expected(number)), "wrong bits"
            manager.reset()
            if self.is_freed:
                assert_all_idle(manager)
        except BaseException as error:
            return f"{type(error).__name__}: {str(error)[:150]}"
        finally:
            drop_hooks()
        return None

    def check(self, kind: str, directory: Path, *, every: int) -> None:
        """Interrupt at every so many of the lines that a step runs."""
        with manager_of(kind, directory, window_bytes=4096) as manager:
            self.step(manager, 0)
            points = chosen(points_in(self.paths, lambda: self.step(manager, 1)), every=every)
        assert len(points) > 100 // every
        found = [(point, self.what_is_wrong(kind, directory, point)) for point in points]
        lines = [f"{point}: {what}" for point, what in found if what is not None]
        if lines:
            text = "\n".join([f"{len(lines)} of {len(points)} lines", *lines])
            pytest.fail(text, pytrace=False)


def every(*numbers: int) -> pytest.MarkDecorator:
    """One of so many lines is interrupted: the first number is quick, the second slow."""
    marks = (), pytest.mark.slow, pytest.mark.exhaustive
    return pytest.mark.parametrize(
        "every", [pytest.param(n, marks=m) for n, m in zip(numbers, marks, strict=False)]
    )


@every(24, 10, 1)
@pytest.mark.parametrize("paths", [ENGINE, STEPS], ids=["engine", "steps"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_at_every_line(
    kind: str, paths: frozenset[str], every: int, tmp_path: Path
) -> None:
    Program(step, expected, paths).check(kind, tmp_path, every=every)


@every(24, 6)
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_an_interrupt_in_a_backward_of_two_parts(kind: str, every: int, tmp_path: Path) -> None:
    program = Program(step_in_parts, expected_in_parts, PARTS, is_freed=False)
    program.check(kind, tmp_path, every=every)


COMMIT = files("_groups/offloader", "_transfer/ticket", "_transfer/deduplication")


@pytest.mark.parametrize("kind", ["cpu", "late"])
def test_an_interrupt_in_a_commit_leaves_bytes_in_one_place(kind: str) -> None:
    """On the device, or on the host; also while the graph of the step that was cut off lives on."""

    def commit(number: int | None) -> bool:
        """Interrupted at a line of that number; whether there was one."""
        with use_backend(make_backend(kind), config=CONFIG) as manager:
            manager.init_model_chunk_offload_handler(None, None, 1)
            chunk = manager.cur_forward_chunk()
            assert chunk is not None
            group = chunk.start("g")
            tensors = [x.to(manager.backend.device) for x in batches(3)]
            packed = [chunk.pack(group, one) for one in (*tensors, tensors[0].t())]
            saved = [one for one in packed if isinstance(one, SavedActivation)]
            assert len(saved) == len(packed) == 4
            at = None
            try:
                with interrupt_at(number or 0, COMMIT) as interrupt:
                    chunk.commit("g")
            except Injected:
                at = interrupt.at
            manager.reset()
            manager.backend.synchronize()
            has_left = any(not isinstance(one.held, Tensor) for one in saved)
            assert (manager.statistics().host_bytes_in_use > 0) == has_left, at
            expected = [*tensors, tensors[0].t()]
            assert all(one.unpack().equal(x) for one, x in zip(saved, expected, strict=True)), at
            del packed, saved
            assert_idle(manager)
        return at is not None

    assert sum(map(commit, range(200))) > 30


# The forward of a module


class Stops(nn.Module):
    """A group whose forward is interrupted when told to."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(12, 12, generator=generator) / 2)
        self.is_told = False

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.weight)
        if self.is_told:
            raise Injected("in the forward")
        return y.sin()


def train(model: nn.Module, *, is_on: bool) -> list[Tensor]:
    """One step."""
    if is_on:
        off_interface.reset()
        off_interface.init_chunk_handler(None, None, 1)
    leaf = input_of(0, 3).requires_grad_()
    model(leaf).square().sum().backward()
    return gradients(model, leaf)


CLOSERS = ["reset", "abort", "remove", "next forward"]
"""What comes behind it."""


@pytest.mark.parametrize("closer", CLOSERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_cut_off(kind: str, closer: str, tmp_path: Path) -> None:
    """PyTorch calls no hook behind a forward that a BaseException ended: ours needs none."""
    model = nn.Sequential(nn.Identity(), Stops(), Stops())
    expected = train(model, is_on=False)
    with manager_of(kind, tmp_path) as manager:
        handle = offload_modules(model, {"part": ["1", "2"]})
        for stops in (1, 2):
            assert same_bits(train(model, is_on=True), expected)
            model[stops].is_told = True
            with pytest.raises(Injected):
                train(model, is_on=True)
            assert hook_depth() == 0
            model[stops].is_told = False
            gc.collect()
            if closer == "remove":
                handle.remove()
                handle = offload_modules(model, {"part": ["1", "2"]})
            elif closer == "next forward":
                assert same_bits(train(model, is_on=True), expected)
            else:
                getattr(manager, closer)()
            assert_no_hooks()
        assert same_bits(train(model, is_on=True), expected)
        handle.remove()
        manager.reset()
        assert_all_idle(manager)


@pytest.mark.parametrize("depth", [1, 2])
def test_hooks_of_others_stay(depth: int, tmp_path: Path) -> None:
    """Closing a scope that was left behind takes nothing of what others installed around it."""
    seen: list[Tensor] = []
    theirs = saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x)
    model = nn.Sequential(Stops(), Stops())
    with manager_of("host", tmp_path) as manager:
        offload_modules(model, {"part": ["0", "1"]})
        with ExitStack() as stack:
            for _ in range(depth):
                stack.enter_context(theirs)
            model[1].is_told = True
            with pytest.raises(Injected):
                train(model, is_on=True)
            gc.collect()
            manager.reset()
            assert hook_depth() == depth
            input_of(0, 3).requires_grad_().exp()
            assert seen
        assert_no_hooks()
