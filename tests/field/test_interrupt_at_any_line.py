"""F57: whatever line an interrupt hits, no hook stays, and the next steps are right.

A step of two microbatches is cut off at every line of the engine by an exception that nobody
expects, as the handler of a signal may raise it anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from field_checks import hook_depth
from injected import Injected, Point, chosen, folders, interrupt_at, points_in
from test_split import MICROBATCHES, tell
from test_split import run_step as run_in_parts
from threaded import (
    TABLE,
    Net,
    assert_all_idle,
    block,
    gradients,
    input_of,
    manager_of,
    plain,
)
from torch import Tensor, nn
from toy import batches, make_model, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadActivations, PipelineOffloadManager, offload_modules

pytestmark = pytest.mark.field("F57")

LINES = folders("_core", "_groups", "_megatron", "_activations")
WITHOUT = cache(plain)
DELAY = 1
"""How far the second part of a backward is behind the first, in microbatches."""


class Graph(NamedTuple):
    """A forward whose backward is to come."""

    seed: int
    number: int
    model: nn.Module
    leaf: Tensor
    loss: Tensor

    def is_right(self) -> bool:
        """Run its backward; whether the gradients are those without offload."""
        self.loss.backward()
        found = gradients(self.model, self.leaf)
        return same_bits(found, WITHOUT(self.seed, self.seed, self.number))


class Block(nn.Module):
    """A block of :class:`Net`, as a module."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x + block(x, self.weight, TABLE, False)


class Program:
    """Trains with one of the products.

    Attributes:
        owner: Of ``statistics()``.
        graphs: Those whose backward has not begun.
    """

    def __init__(self, product: str, manager: PipelineOffloadManager) -> None:
        self.product, self.manager = product, manager
        self.owner: PipelineOffloadManager | OffloadActivations = manager
        self.around: AbstractContextManager[object] = nullcontext()
        if product == "context":
            self.owner = self.around = OffloadActivations(
                min_offload_size=1,
                max_fwd_stash_size=3,
                config=manager.config,
                backend=manager.backend,
            )
        self.models = [self._model(seed) for seed in range(2)]
        self.graphs: list[Graph] = []

    def _model(self, seed: int) -> nn.Module:
        net = Net(seed, is_on=self.product == "groups")
        if self.product == "modules":
            model = nn.Sequential(*map(Block, net.weights))
            offload_modules(model, {"block": "*"})
            return model
        return net

    def step(self, number: int) -> bool:
        """Two forwards, then two backwards; whether all gradients are right."""
        self.begin()
        for seed, model in enumerate(self.models):
            leaf = input_of(seed, number).requires_grad_()
            if self.owner is self.manager:
                off_interface.init_chunk_handler(None, None, 1)
            with self.around:
                loss = model(leaf).square().mean()
            self.graphs.append(Graph(seed, number, model, leaf, loss))
        return all([self.graphs.pop(0).is_right() for _ in self.models])

    def begin(self) -> None:
        if self.owner is self.manager:
            self.manager.reset()
        else:
            with self.around:
                pass


class InParts(Program):
    """Six microbatches, the backward of each in two parts."""

    def step(self, number: int) -> bool:
        if self.manager.offloader.split is None:
            tell(self.manager, DELAY)
        model, inputs = make_model(layers=2), batches(MICROBATCHES, step=number)
        return same_bits(run_in_parts(model, inputs, DELAY, self.manager), in_parts(number))


@cache
def in_parts(number: int) -> list[Tensor]:
    """What :meth:`InParts.step` computes, without offload."""
    model = make_model(layers=2, groups=())
    return run_in_parts(model, batches(MICROBATCHES, step=number), DELAY, None)


@contextmanager
def program_of(product: str, tier: str, directory: Path) -> Iterator[Program]:
    """After a first step."""
    with manager_of(tier, directory, window_bytes=4096) as manager:
        program = (InParts if product == "in parts" else Program)(product, manager)
        assert program.step(0)
        yield program


def what_is_wrong(program: Program, point: Point) -> str | None:
    """After an interrupt at a point of the second step."""
    try:
        with interrupt_at(point.number, LINES) as interrupt:
            program.step(1)
    except Injected:
        depth = hook_depth()  # while it is handled, and keeps frames alive
    else:
        # Copies end sooner or later, so not every run is of the same length.
        return None if interrupt.at is None else "the exception is lost"
    older, program.graphs = program.graphs, []
    for model in program.models:
        model.zero_grad()  # what was cut off had accumulated
    try:
        assert depth == 0, "hooks are left"
        assert all([program.step(number) for number in (2, 3)]), "wrong gradients"
        assert all([graph.is_right() for graph in older]), "wrong gradients of older graphs"
        program.begin()
        if program.product != "in parts":  # PyTorch keeps the graph of such a backward
            del older
            assert_all_idle(program.owner)
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:150]}"
    return None


PRODUCTS = ["in parts", "modules", "context", "groups"]
TIERS = ["host", "copy threads", "disk", "staged disk"]


def check(product: str, tier: str, directory: Path, *, every: int) -> None:
    """Interrupt at every so many of the lines that a step runs."""
    with program_of(product, tier, directory) as program:
        points = chosen(points_in(LINES, lambda: program.step(1)), every=every)
    assert len(points) > 200 // every
    wrong: list[str] = []
    for point in points:
        with program_of(product, tier, directory) as program:
            reason = what_is_wrong(program, point)
        if reason is not None:
            wrong.append(f"{point}: {reason}")
    if wrong:
        text = "\n".join([f"{len(wrong)} of {len(points)} lines", *wrong])
        pytest.fail(text, pytrace=False)


@pytest.mark.parametrize(("product", "tier"), list(zip(PRODUCTS, TIERS, strict=True)))
def test_an_interrupt_at_some_lines(product: str, tier: str, tmp_path: Path) -> None:
    check(product, tier, tmp_path, every=100 if product == "in parts" else 25)


@pytest.mark.parametrize(
    "every",
    [pytest.param(8, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.exhaustive)],
)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("product", PRODUCTS)
def test_an_interrupt_at_every_line(product: str, tier: str, every: int, tmp_path: Path) -> None:
    check(product, tier, tmp_path, every=every)
