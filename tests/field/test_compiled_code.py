"""F27: compiled code in a group is offloaded, is compiled once, and is not looked into."""

from __future__ import annotations

import ast
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import ACCELERATORS, make_backend, skip_on_emulated
from field_checks import Chain, make_inputs
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from toy import assert_idle, assert_no_hooks, same_bits

import pp_offload
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    OffloadActivations,
    OffloadConfig,
    PipelineOffloadManager,
    checkpoint,
    offload_modules,
    use_backend,
)
from pp_offload._activations.stash import ActivationStash
from pp_offload._checkpoint.recompute import Recompute
from pp_offload.backends import CpuBackend
from pp_offload.layers import offload_layers
from pp_offload.pipelining import attach

pytestmark = pytest.mark.field("F27")

COMPILERS = [
    "aot_eager",
    pytest.param(
        "inductor", marks=pytest.mark.skipif(which("g++") is None, reason="no C++ compiler")
    ),
]
REAL = ["cpu", "cpu threads", *ACCELERATORS]
"""Nothing is compiled while a simulated device watches every operation."""


@pytest.fixture(params=REAL)
def manager(request: pytest.FixtureRequest) -> Iterator[PipelineOffloadManager]:
    torch.compiler.reset()
    config = OffloadConfig(min_offloaded_tensor_size=1)
    with use_backend(make_backend(request.param), config=config) as fresh:
        yield fresh
    torch.compiler.reset()


class Block(nn.Module):
    """Residual; part of it may be compiled."""

    def __init__(self, compiler: str | None) -> None:
        super().__init__()
        mlp = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
        self.mlp = mlp if compiler is None else torch.compile(mlp, backend=compiler)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class InGroup(nn.Module):
    """A group around a module; around what it computes before and after as well."""

    def __init__(self, inner: nn.Module, scope: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.scope = inner, scope

    def forward(self, x: Tensor) -> Tensor:
        return self.scope(x, lambda x: self.inner(x.sin()).tanh())


def as_group(x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    with off_interface(True, x, "mlp") as x:
        y = compute(x)
    return off_interface.group_commit(y, name="mlp")


def in_context(x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    with off_interface.get_context(True):
        return as_group(x, compute)


def alone(x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    return compute(x)


def build(compiler: str | None, scope: Callable[..., Tensor], device: torch.device) -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(*(InGroup(Block(compiler), scope) for _ in range(3))).to(device)


def train(
    model: nn.Module, device: torch.device, is_on: bool, *, freeze: bool = True
) -> list[Tensor]:
    """Three steps of two microbatches; from the second on nothing may be compiled."""
    results: list[Tensor] = []
    for step in range(3):
        guard: AbstractContextManager[object] = nullcontext()
        if step and freeze:
            guard = torch.compiler.set_stance("fail_on_recompile")
        with guard:
            if is_on:
                off_interface.reset()
            losses = []
            for x in make_inputs(2, step=step, device=device):
                if is_on:
                    off_interface.init_chunk_handler(None, None, 1)
                losses.append((model(x * 2).square().sum(), x))
            for loss, _ in losses:
                loss.backward()
                results.append(loss.detach())
        results += [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
    return results


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("scope", [as_group, in_context])
def test_compiled_block_in_a_group(
    manager: PipelineOffloadManager, compiler: str, scope: Callable[..., Tensor]
) -> None:
    """Traced first inside the group: its hooks must not get what tracing makes."""
    if scope is in_context and compiler == "inductor":
        pytest.skip("it takes long, and aot_eager saves the same tensors")
    if compiler == "inductor":
        skip_on_emulated(manager.backend, "inductor makes no code for such a device")
    device = manager.backend.device
    got = train(build(compiler, scope, device), device, True)
    assert_idle(manager)
    # More than what sin and tanh save beside the compiled code, in every group of every step.
    nbytes_of_one = 4 * 6 * 4
    assert manager.statistics().bytes_offloaded > 2 * nbytes_of_one * (3 * 2 * 3)
    assert same_bits(got, train(build(compiler, alone, device), device, False, freeze=False))


def test_one_compilation_serves_both(manager: PipelineOffloadManager) -> None:
    """With offload or without: what is compiled does not depend on it."""
    device = manager.backend.device
    inner = Block("aot_eager").to(device)
    with_offload, without = InGroup(inner, as_group), InGroup(inner, alone)
    expected = train(without, device, False)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert same_bits(train(with_offload, device, True), expected)
        assert same_bits(train(without, device, False), expected)
    assert manager.statistics().bytes_offloaded > 0


@pytest.mark.parametrize("is_in_place", [False, True])
def test_compiled_modules_by_name(manager: PipelineOffloadManager, is_in_place: bool) -> None:
    device = manager.backend.device
    model = build(None if is_in_place else "aot_eager", alone, device)
    pattern = "*.inner" if is_in_place else "*.inner.mlp"
    if is_in_place:
        for layer in model:
            layer.inner.compile(backend="aot_eager", fullgraph=True)
    compiled = model[0].inner._compiled_call_impl
    expected = train(model, device, False)
    with offload_modules(model, {"mlp": pattern}):
        assert same_bits(train(model, device, True), expected)
    assert manager.statistics().bytes_offloaded > 0
    assert model[0].inner._compiled_call_impl is compiled
    assert_idle(manager)


def test_a_whole_model_with_markers_inside(manager: PipelineOffloadManager) -> None:
    """They do nothing there, and break no graph."""
    device = manager.backend.device
    on, off = (Chain(("a", "b"), 2, is_on=is_on, device=device) for is_on in (True, False))
    compiled = torch.compile(on, backend="aot_eager", fullgraph=True)
    expected = train(torch.compile(off, backend="aot_eager"), device, False)
    assert same_bits(train(compiled, device, True), expected)
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


def in_activations(x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    offload = OffloadActivations(min_offload_size=1, max_fwd_stash_size=2, backend=CpuBackend())
    offload.keep_module(compute)  # type: ignore[arg-type]
    with offload:
        return compute(x)


def as_checkpoint(x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    stash = ActivationStash("inputs", min_offload_size=1, backend=CpuBackend())
    recompute = Recompute(stash)
    recompute.begin()
    return recompute(compute, x)


@pytest.mark.parametrize("scope", [as_group, in_context, in_activations, as_checkpoint])
def test_hooks_are_not_compiled_where_the_compiler_leaves_a_forward(
    manager: PipelineOffloadManager, scope: Callable[..., Tensor]
) -> None:
    """Autograd calls our hooks amid its operators. With sizes that vary, tracing them failed."""
    device = manager.backend.device
    if device.type != "cpu":
        pytest.skip("two of the scopes are made for the CPU")

    def run(scope: Callable[..., Tensor], is_on: bool) -> tuple[list[Tensor], int]:
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(4)
        model = torch.compile(NotCut(), backend="aot_eager")
        results: list[Tensor] = []
        for rows in (2, 3, 4, 5):
            if is_on:
                off_interface.reset()
                off_interface.init_chunk_handler(None, None, 1)
            x = torch.arange(rows * 6.0).reshape(rows, 6).requires_grad_()
            loss = scope(x * 2, model).square().mean()
            loss.backward()
            results += [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
            model.zero_grad()
        return results, torch._dynamo.utils.counters["frames"]["total"]

    gc.collect()
    gc.disable()  # engines of before would end while something is compiled, and count as frames
    try:
        expected, num_frames = run(alone, False)
        got, num_with_offload = run(scope, True)
    finally:
        gc.enable()
    assert same_bits(got, expected)
    assert num_with_offload == num_frames


class Stage(nn.Module):
    """One module to name, compiled as a whole."""

    def __init__(self, inner: nn.Module, is_compiled: bool) -> None:
        super().__init__()
        self.inner = torch.compile(inner, backend="aot_eager") if is_compiled else inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def test_whole_stage_of_a_pipeline(manager: PipelineOffloadManager, one_rank: None) -> None:
    device = manager.backend.device
    if device.type != "cpu":
        pytest.skip("gloo moves tensors of the CPU")

    def run(is_on: bool, is_compiled: bool) -> list[Tensor]:
        torch.manual_seed(4)
        stage = Stage(nn.Sequential(Block(None), Block(None)), is_compiled)
        schedule = ScheduleGPipe(
            PipelineStage(stage, 0, 1, device), 3, loss_fn=nn.functional.mse_loss
        )
        handle = attach(schedule, {"stage": "inner"}) if is_on else nullcontext()
        seen: list[Tensor] = []
        with handle:
            for step in range(3):
                x = torch.cat(make_inputs(3, step=step))
                schedule.step(x, target=x * 2, losses=(losses := []))
                seen += losses + [p.grad.clone() for p in stage.parameters()]
        return [t.detach() for t in seen]

    assert same_bits(run(True, True), run(False, True))
    assert manager.statistics().bytes_offloaded > 0
    off_interface.reset()
    assert_idle(manager)


def in_groups(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    for name in ("a", "b"):
        with off_interface(True, x, name) as x:
            y = compute(x)
        x = off_interface.group_commit(y, name)
    return x


def in_context(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with OffloadActivations(min_offload_size=1, max_fwd_stash_size=1):
        return compute(compute(x))


def checkpointed(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    for _ in range(2):
        x = checkpoint(compute, x, offload_inputs=True, min_offload_size=1)
    return x


@pytest.mark.parametrize("run", [in_groups, in_context, checkpointed])
def test_a_backward_is_compiled(
    manager: PipelineOffloadManager,
    run: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor],
) -> None:
    """It has the unpack hooks in it, whose copies are no operators of its own."""
    weight = torch.randn(32, 32, device=manager.backend.device)

    def compute(x: Tensor) -> Tensor:
        return torch.sin(x @ weight) * x

    for _ in range(3):
        off_interface.reset()
        off_interface.init_chunk_handler(None, None, 1)
        inputs = torch.randn(16, 32, device=weight.device).requires_grad_()
        (expected,) = torch.autograd.grad(compute(compute(inputs)).sum(), inputs)
        output = run(compute, inputs).sum()
        with compiled_autograd._enable(torch.compile(backend="eager")):
            output.backward()
        assert torch.equal(inputs.grad, expected)
    off_interface.reset()
    assert_idle(manager)


def test_layers_on_the_host_in_a_compiled_model_warn_of_nothing() -> None:
    """A compiler that comes by our hooks finds no cache to be afraid of."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(3))))
    with warnings.catch_warnings(), offload_layers(model, "0"):
        warnings.filterwarnings("error", message="(?s).*lru_cache")
        compiled = torch.compile(model, backend="eager")
        compiled(torch.ones(4, 8, requires_grad=True)).sum().backward()


def test_nothing_private_of_the_compiler() -> None:
    names = {
        dotted
        for path in Path(pp_offload.__file__).parent.rglob("*.py")
        if path.name != "torch_private.py"
        for node in ast.walk(ast.parse(path.read_text()))
        for dotted in names_in(node)
    }
    private = {"_dynamo", "_inductor", "_functorch", "_higher_order_ops"}
    assert "torch" in names
    assert not names & private


def names_in(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {part for alias in node.names for part in alias.name.split(".")}
    if isinstance(node, ast.ImportFrom):
        return {*(node.module or "").split("."), *(alias.name for alias in node.names)}
    return {node.attr} if isinstance(node, ast.Attribute) else set()
