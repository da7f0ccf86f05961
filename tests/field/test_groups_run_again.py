"""F53: a group inside a checkpoint does nothing, in forward and when the region runs again.

A checkpoint matches what its function saves by position. So a group in it that collected in the
forward and did nothing in the recomputation would shift all that is saved behind it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from conftest import BACKENDS, BEFORE_2_13, make_backend
from field_checks import hook_depth
from test_groups_and_checkpoints import keep_products
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from toy import assert_idle, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    GroupStateError,
    OffloadActivations,
    OffloadConfig,
    PipelineOffloadManager,
    fine_grained_offloading_group_start,
    offload_modules,
    recompute_layers,
    use_backend,
)
from pp_offload._activations.stash import ActivationStash
from pp_offload._checkpoint.recompute import Recompute
from pp_offload._checkpoint.selective import OpPolicy
from pp_offload._hooks import regions
from pp_offload._megatron.interface import (
    FineGrainedOffloadingGroupCommitFunction,
    FineGrainedOffloadingGroupStartFunction,
)
from pp_offload.pipelining import attach

pytestmark = pytest.mark.field("F53")

CONFIG = OffloadConfig(min_offloaded_tensor_size=1)

Function = Callable[[Tensor], Tensor]
Run = Callable[[Function, Tensor], Tensor]

PLACES = ("start", "middle", "end")


@pytest.fixture(autouse=True)
def nobody_was_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "_warned", set())


def torchs(stops: bool, **options: Any) -> Run:
    return partial(checkpoint, use_reentrant=False, early_stop=stops, **options)


def ours(stops: bool, **options: Any) -> Run:
    return Recompute(early_stop=stops, **options)


def ours_offloaded(stops: bool) -> Run:
    stash = ActivationStash("inputs", min_offload_size=1, backend=make_backend("cpu"))
    return Recompute(stash, early_stop=stops)


def nested(stops: bool) -> Run:
    outer, inner = torchs(stops), torchs(stops)
    return lambda function, x: outer(lambda y: inner(function, y.sin()).exp(), x)


CHECKPOINTS: dict[str, Callable[[bool], Run]] = {
    "torch": torchs,
    "torch, selective": partial(
        torchs, context_fn=partial(create_selective_checkpoint_contexts, keep_products)
    ),
    "torch, nested": nested,
    "torch, reentrant": lambda stops: partial(checkpoint, use_reentrant=True),
    "ours": ours,
    "ours, reentrant": lambda stops: Recompute(use_reentrant=True),
    "ours, offloaded": ours_offloaded,
}

if not BEFORE_2_13:
    CHECKPOINTS["ours, selective"] = partial(
        ours, policy=OpPolicy(frozenset([torch.ops.aten.tanh.default]))
    )

# Groups


def by_interface(function: Function, x: Tensor) -> Tensor:
    with off_interface(True, x, "g"):
        y = function(x)
    return off_interface.group_commit(y, name="g")


def by_functions(function: Function, x: Tensor) -> Tensor:
    fine_grained_offloading_group_start(x, "g")
    with off_interface.get_context(True):
        y = function(x)
    return off_interface.group_commit(y, name="g")


def by_markers(function: Function, x: Tensor) -> Tensor:
    chunk = PipelineOffloadManager.get_instance().cur_forward_chunk()
    x = FineGrainedOffloadingGroupStartFunction.apply(x * 1, chunk, "g")
    with off_interface.get_context(True):
        y = function(x)
    return FineGrainedOffloadingGroupCommitFunction.apply(y * 1, chunk, "g", None, False)


def by_context(function: Function, x: Tensor) -> Tensor:
    with OffloadActivations(min_offload_size=1, backend=make_backend("cpu")):
        return function(x)


MARKS: dict[str, Run] = {
    "interface": by_interface,
    "functions": by_functions,
    "markers": by_markers,
    "context": by_context,
}


def plainly(function: Function, x: Tensor) -> Tensor:
    return function(x)


def body(x: Tensor, mark: Run = by_interface, place: str = "middle") -> Tensor:
    """Three parts that save tensors of one shape, so that a wrong one is not noticed."""
    for name in PLACES:
        x = (mark if name == place else plainly)(lambda y: torch.tanh(y).sin() * y, 2 * x)
    return torch.tanh(x) if place != "end" else x


def start(manager: PipelineOffloadManager, seed: int = 0) -> Tensor:
    """A step and a chunk begin; an input."""
    manager.reset()
    off_interface.init_chunk_handler(None, None, 1)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 6, generator=generator).to(manager.backend.device).requires_grad_()


def expected(function: Function, x: Tensor) -> list[Tensor]:
    leaf = x.detach().clone().requires_grad_()
    return [torch.autograd.grad(function(leaf).sum(), leaf)[0]]


def nothing_left(manager: PipelineOffloadManager) -> None:
    assert_idle(manager)
    assert hook_depth() == 0


@pytest.mark.parametrize("stops", [True, False], ids=["early stop", "to the end"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", CHECKPOINTS)
@pytest.mark.parametrize("kind", BACKENDS)
def test_same_bits(kind: str, way: str, place: str, stops: bool) -> None:
    """Also twice through one graph, and behind a look at a saved tensor."""
    with use_backend(make_backend(kind), config=CONFIG) as manager:
        run = CHECKPOINTS[way](stops)
        for mark in MARKS.values():
            x = start(manager)
            y = run(partial(body, mark=mark, place=place), x).exp()
            assert hook_depth() == 0
            assert manager.statistics().bytes_offloaded == 0
            assert same_bits([y.grad_fn._saved_result], [y.detach()])
            (reference,) = expected(lambda x: body_without(way, x, place).exp(), x)
            if "selective" not in way:  # which goes back once
                y.sum().backward(retain_graph=True)
                reference = 2 * reference
            y.sum().backward()
            assert same_bits([x.grad], [reference])
            del y
            nothing_left(manager)


def body_without(way: str, x: Tensor, place: str) -> Tensor:
    inside = partial(body, mark=plainly, place=place)
    return inside(x.sin()).exp() if way == "torch, nested" else inside(x)


# Around, and across the border


@pytest.mark.parametrize("stops", [True, False], ids=["early stop", "to the end"])
@pytest.mark.parametrize("mark", [by_interface, by_functions])
def test_a_group_around_and_one_of_the_same_name_inside(
    manager: PipelineOffloadManager, mark: Run, stops: bool
) -> None:
    """The commit inside is not that of the group around."""
    run = torchs(stops)
    x = start(manager)
    y = mark(lambda x: run(partial(body, mark=mark), x.sin()).exp(), x)
    chunk = manager.cur_forward_chunk()
    assert chunk is not None and [group.name for group in chunk.groups] == ["g"]
    assert not chunk.open_groups and not chunk.left_out
    assert manager.statistics().bytes_offloaded > 0
    y.sum().backward()
    reference = expected(lambda x: body(x.sin(), plainly).exp(), x)
    assert same_bits([x.grad], reference)
    del y
    nothing_left(manager)


@pytest.mark.parametrize("stops", [True, False], ids=["early stop", "to the end"])
def test_a_group_that_starts_outside_and_is_committed_inside(
    manager: PipelineOffloadManager, stops: bool
) -> None:
    """It is committed, once, with what was saved outside."""

    def inside(x: Tensor) -> Tensor:
        return off_interface.group_commit(x.tanh().sin(), name="across").exp()

    x = start(manager)
    with off_interface(True, x, "across"):
        y = x.sin()
    y = torchs(stops)(inside, y)
    assert manager.statistics().bytes_offloaded == x.nbytes
    y.sum().backward()
    assert same_bits([x.grad], expected(lambda x: x.sin().tanh().sin().exp(), x))
    del y
    nothing_left(manager)


@pytest.mark.parametrize("stops", [True, False], ids=["early stop", "to the end"])
def test_a_group_that_starts_inside_and_is_committed_outside(
    manager: PipelineOffloadManager, stops: bool
) -> None:
    """It does nothing."""

    def inside(x: Tensor) -> Tensor:
        with off_interface(True, x, "across"):
            return x.tanh().sin()

    x = start(manager)
    y = off_interface.group_commit(torchs(stops)(inside, x).exp(), name="across")
    y.sum().backward()
    assert manager.statistics().bytes_offloaded == 0
    assert same_bits([x.grad], expected(lambda x: x.tanh().sin().exp(), x))
    with pytest.raises(GroupStateError, match="no group of that name was started"):
        off_interface.group_commit(y, name="across")
    del y
    nothing_left(manager)


# What is different by the time that backward comes


def disabled(manager: PipelineOffloadManager) -> Iterator[None]:
    manager.disable_offload()
    yield
    manager.enable_offload()


def without_chunk(manager: PipelineOffloadManager) -> Iterator[None]:
    manager.end_chunk()
    yield
    off_interface.init_chunk_handler(None, None, 1)


def as_before(manager: PipelineOffloadManager) -> Iterator[None]:
    yield


SITUATIONS = [disabled, without_chunk, as_before]


@pytest.mark.parametrize("in_backward", SITUATIONS)
@pytest.mark.parametrize("in_forward", SITUATIONS)
def test_no_switch_matters(
    manager: PipelineOffloadManager, in_forward: Any, in_backward: Any
) -> None:
    x = start(manager)
    with contextmanager(in_forward)(manager):
        y = torchs(False)(body, x)
    with contextmanager(in_backward)(manager):
        y.sum().backward()
    assert same_bits([x.grad], expected(partial(body, mark=plainly), x))
    del y
    nothing_left(manager)


def test_a_model_that_begins_its_own_chunks_is_run_again(manager: PipelineOffloadManager) -> None:
    """By a checkpoint around it: the recomputation begins none."""

    def model(x: Tensor) -> Tensor:
        off_interface.init_chunk_handler(None, None, 1)
        return body(x)

    x = start(manager)
    y = torchs(True)(model, x)
    chunk = manager.cur_forward_chunk()
    y.sum().backward()
    assert manager.cur_forward_chunk() is chunk
    assert same_bits([x.grad], expected(partial(body, mark=plainly), x))


# By module name


class Net(nn.Module):
    """Three parts; ``mlp`` is the group."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.mlp, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.mlp(torch.tanh(self.a(x)))))


class Layer(nn.Module):
    """A net under a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.net, x, use_reentrant=False)


def test_modules_and_a_schedule(one_rank: None) -> None:
    """A pattern inside does nothing; one for the layer around the checkpoint takes its input."""
    found = []
    for groups in ({"mlp": "*.net.mlp"}, {"mlp": "*.net.mlp", "layer": "*"}, None):
        with use_backend(make_backend("late"), config=CONFIG) as manager:
            torch.manual_seed(2)
            model = nn.Sequential(Layer(), Layer())
            stage = PipelineStage(model, 0, 1, torch.device("cpu"))
            schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
            if groups is not None:
                attach(schedule, groups)
            losses: list[Tensor] = []
            torch.manual_seed(3)
            x = torch.randn(8, 6)
            schedule.step(x, target=x.flip(0), losses=losses, return_outputs=False)
            found.append([*map(Tensor.detach, losses), *(p.grad for p in model.parameters())])
            moved = manager.statistics().bytes_offloaded
            assert (moved > 0) == (groups is not None and "layer" in groups)
    assert same_bits(found[0], found[2]) and same_bits(found[1], found[2])


# The warning


@pytest.mark.parametrize("run", [torchs(True), partial(checkpoint, use_reentrant=True)])
def test_one_warning_for_each_name(
    manager: PipelineOffloadManager, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """It says what to use instead; nothing else is said of such a group."""
    model = Net().to(manager.backend.device)
    with offload_modules(model, {"mlp": "mlp"}):
        for seed in range(3):
            x = start(manager, seed)
            run(model, run(body, x)).sum().backward()
        manager.reset()
    assert [r.levelno for r in caplog.records] == [logging.WARNING] * 2
    records = sorted(caplog.records, key=lambda record: record.message)
    for record, name in zip(records, "g mlp".split(), strict=True):
        assert f"group '{name}' is inside a checkpoint and does nothing" in record.message
        assert "inside the group" in record.message
        assert "pp_offload.checkpoint_wrapper(module, offload_inputs=True)" in record.message


def test_no_warning_where_it_was_asked_for(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    """By ``recompute_layers``, whose layers have groups in other places."""
    model = nn.Sequential(Net(), Net()).to(manager.backend.device)
    recompute_layers(model, ["1"])
    with offload_modules(model, {"mlp": "*.mlp"}):
        for seed in range(3):
            model(start(manager, seed)).sum().backward()
    manager.reset()
    assert not caplog.records
    assert manager.statistics().bytes_offloaded > 0


def test_a_context_inside_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(4, requires_grad=True)
    caplog.clear()
    torchs(True)(lambda x: by_context(torch.exp, x), x).sum().backward()
    assert any("OffloadActivations is inside a checkpoint" in r.message for r in caplog.records)
