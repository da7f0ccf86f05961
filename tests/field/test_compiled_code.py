"""F27: compiled code is offloaded, is compiled once, and is not looked into."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from conftest import ACCELERATORS
from helpers.sessions import assert_no_hooks, begin_microbatch, gradients, group, session
from helpers.toy import check_steps, make_inputs, same_bits
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadActivations, PipelineOffloadManager, checkpoint, offload_modules
from pp_offload.backends import CpuBackend

pytestmark = pytest.mark.filterwarnings("ignore:Using `torch.compile")

Function = Callable[[Tensor], Tensor]

# Groups. Nothing is compiled while a simulated device watches every operation.

real = pytest.mark.parametrize("backend", ["cpu threads", *ACCELERATORS], indirect=True)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    yield
    torch.compiler.reset()


class Block(nn.Module):
    """Residual; part of it may be compiled, all of it may be inside a scope."""

    def __init__(self, is_compiled: bool) -> None:
        super().__init__()
        mlp = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
        self.mlp = torch.compile(mlp, backend="aot_eager") if is_compiled else mlp
        self.scope: Callable[..., Tensor] = lambda x, compute: compute(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.scope(x, lambda x: (x.sin() + self.mlp(x.sin())).tanh())


def in_context(x: Tensor, compute: Function) -> Tensor:
    with off_interface.get_context(True):
        return group(x, compute)


def in_activations(x: Tensor, compute: Function) -> Tensor:
    offload = OffloadActivations(min_offload_size=1, max_fwd_stash_size=2, backend=CpuBackend())
    if isinstance(compute, nn.Module):
        offload.keep_module(compute)
    with offload:
        return compute(x)


def as_checkpoint(x: Tensor, compute: Function) -> Tensor:
    return checkpoint(compute, x, offload_inputs=True, min_offload_size=1)


def check_compiled(
    manager: PipelineOffloadManager,
    model: nn.Module,
    switch: Callable[[bool], Any],
    *,
    moves: bool = True,
) -> None:
    """Steps of two microbatches; what the first compiled, with offload or without, serves all."""

    def train(is_on: bool, number: int) -> list[Tensor]:
        with switch(is_on) or nullcontext():
            leaves = make_inputs(2, step=number, device=manager.backend.device)
            losses = []
            for x in leaves:
                begin_microbatch(is_on)
                losses.append(model(x.requires_grad_() * 2).square().sum())
            for loss in losses:
                loss.backward()
        return [*(loss.detach() for loss in losses), *gradients(*leaves, *model.parameters())]

    check_steps(manager, train, steps=1, moves=moves)
    with torch.compiler.set_stance("fail_on_recompile"):
        check_steps(manager, train, steps=2, moves=moves)


@pytest.mark.field("F27")
@real
@pytest.mark.parametrize("scope", [group, in_context])
def test_a_compiled_block_in_a_group(
    manager: PipelineOffloadManager, scope: Callable[..., Tensor]
) -> None:
    """Its hooks do not get what tracing makes, and what is compiled does not depend on them."""
    model = nn.Sequential(*(Block(True) for _ in range(3))).to(manager.backend.device)

    def switch(is_on: bool) -> None:
        for block in model:
            block.scope = scope if is_on else lambda x, compute: compute(x)

    before = manager.statistics().bytes_offloaded
    check_compiled(manager, model, switch)
    # More than what sin and tanh save beside the compiled code, in every group of every step.
    assert manager.statistics().bytes_offloaded - before > 2 * 4 * 6 * 4 * (3 * 2 * 2)


@pytest.mark.field("F27")
@real
@pytest.mark.parametrize("is_in_place", [False, True])
def test_compiled_modules_by_name(manager: PipelineOffloadManager, is_in_place: bool) -> None:
    model = nn.Sequential(*(Block(not is_in_place) for _ in range(3)))
    model.to(manager.backend.device)
    for block in model if is_in_place else ():
        block.compile(backend="aot_eager", fullgraph=True)
    groups = {"mlp": "*" if is_in_place else "*.mlp"}
    check_compiled(manager, model, lambda is_on: offload_modules(model, groups) if is_on else None)


@pytest.mark.field("F27")
@real
def test_a_whole_model_with_markers_inside(manager: PipelineOffloadManager) -> None:
    """They do nothing there, and break no graph."""
    model = nn.Sequential(Block(False), Block(False)).to(manager.backend.device)
    for block in model:
        block.scope = group
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    check_compiled(manager, compiled, lambda is_on: None, moves=False)
    assert manager.statistics().bytes_offloaded == 0
    assert_no_hooks()


class NotCut(nn.Module):
    """The compiler leaves this forward as it is, and takes what it calls instead."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        try:
            torch._dynamo.graph_break()
            return x + self.down((self.up(x).sin() * 2).tanh())
        finally:
            pass


@pytest.mark.field("F27")
@pytest.mark.parametrize("backend", ["cpu"], indirect=True)
@pytest.mark.parametrize("scope", [group, in_context, in_activations, as_checkpoint])
def test_hooks_are_not_compiled_where_the_compiler_leaves_a_forward(
    manager: PipelineOffloadManager, scope: Callable[..., Tensor]
) -> None:
    """Autograd calls our hooks amid its operators. With sizes that vary, tracing them failed."""

    def run(is_on: bool) -> tuple[list[Tensor], int]:
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(4)
        model = torch.compile(NotCut(), backend="aot_eager")
        results: list[Tensor] = []
        for rows in (2, 3, 4, 5):
            manager.reset()
            begin_microbatch(is_on)
            x = torch.arange(rows * 6.0).reshape(rows, 6).requires_grad_()
            loss = (scope(x * 2, model) if is_on else model(x * 2)).square().mean()
            loss.backward()
            results += [loss.detach(), *gradients(x, *model.parameters())]
        return results, torch._dynamo.utils.counters["frames"]["total"]

    gc.collect()
    gc.disable()  # engines of before would end while something is compiled, and count as frames
    try:
        expected, num_frames = run(False)
        got, num_with_offload = run(True)
    finally:
        gc.enable()
    assert same_bits(got, expected)
    assert num_with_offload == num_frames


# The context around a compiled model

WIDTH, ROWS = 12, 5


@pytest.mark.field("F27")
def test_a_context_inside_a_compiled_function_meets_new_sizes() -> None:
    """With sizes that are symbols, code of the engine would not compile."""
    model = nn.Sequential(Block(False), Block(False))
    offload = OffloadActivations(min_offload_size=1, max_fwd_stash_size=3, backend=CpuBackend())

    @torch.compile(backend="aot_eager")
    def compute(x: Tensor) -> Tensor:
        with offload:
            return model(x)

    for number, rows in enumerate((4, 4, 5, 6), 1):
        results = []
        for run in (model, compute):
            run(torch.arange(6.0 * rows).view(rows, 6)).square().mean().backward()
            results.append(gradients(*model.parameters()))
        assert same_bits(*results)
        assert offload.statistics().bytes_offloaded > number * 6 * 4 * 4
    assert_no_hooks()


class Turned(nn.Module):
    """Multiplies with a buffer, which autograd saves, before a norm that has buffers, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("table", torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x.sin() * self.table)).tanh()


WAYS: dict[str, Callable[..., Function]] = {
    "whole": torch.compile,
    "parts": lambda model, **options: nn.Sequential(*(torch.compile(m, **options) for m in model)),
    "function": lambda model, **options: torch.compile(lambda x: model(x).sin(), **options),
    "in place": lambda model, **options: model.compile(**options) or model,
}


def bytes_in_the_context(way: str, is_given: bool) -> int:
    """How many leave in steps that are right; what the first ones compiled serves all."""
    torch.compiler.reset()
    torch.manual_seed(3)
    model = nn.Sequential(*(Turned() for _ in range(2)))
    compute = WAYS[way](model, backend="aot_eager", fullgraph=True)
    offload = OffloadActivations(min_offload_size=1, max_fwd_stash_size=1, backend=CpuBackend())
    if is_given:
        offload.keep_module(model)

    def step(is_on: bool, number: int) -> list[Tensor]:
        leaves = make_inputs(2, step=number, length=ROWS, width=WIDTH)
        losses = []
        for x in leaves:
            with offload if is_on else nullcontext():
                losses.append(compute(x.requires_grad_()).square().mean())
        for loss in losses:
            loss.backward()
        return [*(loss.detach() for loss in losses), *gradients(*leaves, *model.parameters())]

    for is_on in (True, False):  # the hook of a context that was not given the model is guarded
        step(is_on, 0)
    with torch.compiler.set_stance("fail_on_recompile"):
        check_steps(offload, step)
    assert not torch_module._global_forward_pre_hooks
    return offload.statistics().bytes_offloaded


@pytest.mark.field("F27")
@pytest.mark.quick("whole", "parts")
@pytest.mark.parametrize("way", WAYS)
def test_a_model_in_the_context_is_compiled_once(way: str) -> None:
    """Not anew because the next context is another one. Buffers stay, whether or not the context
    was given the model.
    """
    nbytes, nbytes_if_given = (bytes_in_the_context(way, is_given) for is_given in (False, True))
    assert nbytes == nbytes_if_given or way in ("function", "in place")


@pytest.mark.parametrize("way", ["whole", "parts"])
def test_one_warning_of_a_model_that_is_compiled_as_a_whole(
    way: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its backward takes all saved tensors at once; that of a layer those of the layer."""
    monkeypatch.setattr("pp_offload._activations.MANY_TENSORS", 8)
    model = nn.Sequential(*(Turned() for _ in range(8)))
    compute = WAYS[way](model, backend="aot_eager")
    offload = OffloadActivations(min_offload_size=1, backend=CpuBackend())
    for _ in range(2):
        with offload:
            loss = compute(torch.randn(ROWS, WIDTH)).square().mean()
        loss.backward()
    warnings = [line for line in caplog.messages if "layer.compile()" in line]
    assert len(warnings) == (way == "whole")


def test_a_group_in_a_model_that_is_compiled_as_a_whole_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(*(Turned() for _ in range(2)))
    with session(CpuBackend()) as manager, offload_modules(model, {"layer": "*"}):
        compute = torch.compile(model, backend="aot_eager")
        for _ in range(3):
            manager.reset()
            begin_microbatch()
            compute(torch.randn(ROWS, WIDTH)).sum().backward()
        manager.reset()
    (warning,) = [line for line in caplog.messages if "group 'layer'" in line]
    assert "compile each of them" in warning
