"""F53: what a group kept from a checkpoint in the forward, it keeps from it when that runs again.

A checkpoint matches what its function saves by position. So a group in it that collects in the
forward and does nothing in the recomputation shifts all that is saved behind it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest
import torch
from conftest import ACCELERATORS, ON_THE_HOST, make_backend
from field_checks import hook_depth, make_inputs
from quick import chosen
from regions import (
    ORDERS,
    REENTRANT,
    ROWS,
    Case,
    begin_chunk,
    build,
    bytes_moved,
    covering,
    name_of_body,
    patterns,
    run,
)
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.utils.checkpoint import checkpoint
from toy import assert_idle, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    OffloadConfig,
    PipelineOffloadManager,
    fine_grained_offloading_backward_record,
    offload_modules,
    use_backend,
)
from pp_offload.backends import Backend, GraphSafeBackend
from pp_offload.offload_model import OffloadModel
from pp_offload.pipelining import attach
from pp_offload.testing import SimulatedBackend

pytestmark = pytest.mark.field("F53")

CONFIG = OffloadConfig(min_offloaded_tensor_size=1)


def cases() -> Iterator[object]:
    """Those on "late" are repeated on accelerators. Few have every value of each parameter."""
    every = list(covering(ON_THE_HOST))
    few = chosen([asdict(case) for case in every], 1)
    for number, case in enumerate(every):
        marks = () if number in few else (pytest.mark.slow,)
        yield pytest.param(case, case.kind, id=str(case), marks=marks)
        if case.kind == "late":
            for accelerator in ACCELERATORS:
                (kind,) = accelerator.values
                name = str(case).replace("late", kind)
                yield pytest.param(case, kind, id=name, marks=(*accelerator.marks, *marks))


def check_statistics(case: Case, moved: list[int]) -> None:
    """Something leaves in each step, and no more of it as steps go by."""
    assert moved[1] > 0 or case.way in REENTRANT
    assert moved[2] - moved[1] <= moved[1], moved


def check_loop(case: Case, backend: Backend) -> None:
    """A loop of the user's own."""
    (on, activations), (off, _) = (build(case, backend, is_on) for is_on in (True, False))
    manager = PipelineOffloadManager.get_instance()
    owner = activations if case.marking == "activations" else manager
    moved = [0]
    for step in range(2):
        inputs = make_inputs(3, step=step, length=ROWS, device=backend.device)
        torch.manual_seed(5)
        expected = run(off, ORDERS[case.order], inputs, None)
        torch.manual_seed(5)
        manager.reset()
        # A context that is entered again sends what the forward left in it.
        got = run(on, ORDERS[case.order], inputs, bytes_moved if owner is manager else None)
        assert same_bits(got, expected), step
        del got
        assert_idle(owner)
        moved.append(owner.statistics().bytes_offloaded)
    check_statistics(case, moved)


def stages_of(model: nn.Sequential, case: Case, device: torch.device) -> list[PipelineStage]:
    """The layers as stages of their own where backward comes in parts."""
    is_split = case.order == "zero bubble"
    modules = [nn.Sequential(layer) for layer in model] if is_split else [model]
    return [PipelineStage(m, i, len(modules), device) for i, m in enumerate(modules)]


def train(case: Case, backend: Backend, is_on: bool) -> tuple[list[Tensor], list[int]]:
    """Losses and gradients of two steps of a schedule; bytes that left before each, and after."""
    model, _ = build(case, backend, is_on)
    stages = stages_of(model, case, backend.device)
    loss = nn.functional.mse_loss
    schedule = (
        ScheduleInterleavedZeroBubble(stages, 4, loss_fn=loss)
        if case.order == "zero bubble"
        else Schedule1F1B(stages[0], 4, loss_fn=loss)
    )
    handle = None
    if is_on:
        handle = attach(schedule, patterns(case, name_of_body(model)))
    found, moved = [], [0]
    for step in range(2):
        x = torch.cat(make_inputs(4, step=step, length=ROWS)).to(backend.device)
        losses: list[Tensor] = []
        torch.manual_seed(7)
        schedule.step(x, target=x.flip(0), losses=losses, return_outputs=False)
        found += [loss.detach() for loss in losses]
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        del losses
        for stage in stages:
            stage.clear_runtime_states()
        if is_on:
            assert_idle(PipelineOffloadManager.get_instance())
            moved.append(bytes_moved())
    if handle is not None:
        handle.detach()
    return found, moved


def check_schedule(case: Case, backend: Backend) -> None:
    """A schedule of ``torch.distributed.pipelining``."""
    got, moved = train(case, backend, True)
    assert same_bits(got, train(case, backend, False)[0])
    check_statistics(case, moved)


@pytest.mark.parametrize(("case", "kind"), list(cases()))
def test_same_bits(case: Case, kind: str, one_rank: None) -> None:
    with use_backend(make_backend(kind), config=CONFIG) as manager:
        check = check_schedule if case.marking == "attach" else check_loop
        check(case, manager.backend)


# The example that strangers found it with


class Net(nn.Module):
    """Three parts; ``mlp`` is the group."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.mlp, self.c = nn.Tanh(), nn.Tanh(), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(3 * self.mlp(2 * self.a(x)))


def test_example(manager: PipelineOffloadManager) -> None:
    m = Net()
    x = torch.linspace(-1, 1, 12).to(manager.backend.device).requires_grad_()
    (expected,) = torch.autograd.grad(m(x).sum(), x)
    with offload_modules(m, {"mlp": "mlp"}):
        off_interface.reset()
        off_interface.init_chunk_handler(None, None, 1)
        checkpoint(m, x, use_reentrant=False).sum().backward()
    assert same_bits([x.grad], [expected])


# What a case of the matrix has no words for. Each program saves something in front of a group, in
# it, and behind it.

Function = Callable[[Tensor], Tensor]


def plainly(function: Function, x: Tensor) -> Tensor:
    return function(x)


def group(x: Tensor, name: str = "g", **options: object) -> Tensor:
    with off_interface(True, x, name) as x:
        y = torch.tanh(x).sin()
    return off_interface.group_commit(y, name=name, **options)


def body(x: Tensor) -> Tensor:
    return torch.tanh(3 * group(2 * torch.tanh(x)))


def start(manager: PipelineOffloadManager, seed: int = 0) -> Tensor:
    """A step and a chunk begin; an input."""
    manager.reset()
    begin_chunk()
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 6, generator=generator).to(manager.backend.device)
    return x.requires_grad_()


def gradient(function: Function, x: Tensor) -> list[Tensor]:
    """Without offload: disabled groups collect nothing outside a checkpoint."""
    with use_backend(make_backend("cpu"), config=CONFIG) as manager:
        manager.disable_offload()
        begin_chunk()
        leaf = x.detach().cpu().requires_grad_()
        return [torch.autograd.grad(function(leaf).sum(), leaf)[0]]


@pytest.fixture(params=[True, False], ids=["early stop", "no early stop"])
def region(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    """A checkpoint that stops as early as it may, or not."""
    return partial(checkpoint, use_reentrant=False, early_stop=request.param)


Region = Callable[..., Tensor]


def agrees(manager: PipelineOffloadManager, got: Sequence[Tensor], expected: object) -> None:
    """The same bits, and nothing left."""
    assert isinstance(expected, list)
    assert same_bits([one.detach().cpu() for one in got], expected)
    assert_idle(manager)
    assert hook_depth() == 0


def test_frames_of_one_layer_alive_at_once(manager: PipelineOffloadManager, region: Region) -> None:
    """One function three times in each of two microbatches, whose backwards come in any order."""
    weight = torch.linspace(0.5, 1, 24).view(4, 6).requires_grad_()

    def thrice(x: Tensor, run: Region = region) -> Tensor:
        on_device = weight.to(x.device)
        for _ in range(3):
            x = run(lambda x: body(x * on_device), x)
        return x

    for order in ([0, 1], [1, 0], [0]):
        xs = [start(manager, seed) for seed in range(2)]
        ys = []
        for x in xs:
            begin_chunk()
            ys.append(thrice(x).sum())
        if len(order) == 1:
            ys = [ys[0] + ys[1]]
        for number in order:
            ys[number].backward()
        del ys
        expected = [one for x in xs for one in gradient(partial(thrice, run=plainly), x)]
        agrees(manager, [x.grad for x in xs], expected)


def test_nested_checkpoints(manager: PipelineOffloadManager, region: Region) -> None:
    """Groups in both, in front of the inner one, behind it, and around it."""

    def outer(x: Tensor, run: Region = region) -> Tensor:
        x = group(torch.tanh(x), "front")
        x = run(body, torch.sin(x))
        with off_interface(True, x, "around"):
            x = run(body, torch.sin(x))
        x = off_interface.group_commit(x, name="around")
        return torch.sin(group(torch.tanh(x), "behind"))

    x = start(manager)
    region(outer, x).sum().backward()
    agrees(manager, [x.grad], gradient(partial(outer, run=plainly), x))


# What the forward did decides


def disabled(manager: PipelineOffloadManager) -> Iterator[None]:
    manager.disable_offload()
    yield
    manager.enable_offload()


def without_chunk(manager: PipelineOffloadManager) -> Iterator[None]:
    """As in what an attached schedule runs outside of its chunks."""
    manager.end_chunk()
    manager.num_attached += 1
    yield
    manager.num_attached -= 1
    begin_chunk()


def with_chunk_of_large_tensors(manager: PipelineOffloadManager) -> Iterator[None]:
    off_interface.init_chunk_handler(None, None, 10**6)
    yield
    begin_chunk()


def after_reset(manager: PipelineOffloadManager) -> Iterator[None]:
    manager.reset()
    yield
    begin_chunk()


def as_before(manager: PipelineOffloadManager) -> Iterator[None]:
    yield


SITUATIONS = [disabled, without_chunk, with_chunk_of_large_tensors, as_before]


@pytest.mark.covering(2)
@pytest.mark.parametrize("in_backward", [*SITUATIONS, after_reset])
@pytest.mark.parametrize("in_forward", SITUATIONS)
def test_what_the_forward_did_decides(
    manager: PipelineOffloadManager,
    region: Region,
    in_forward: Callable[..., Iterator[None]],
    in_backward: Callable[..., Iterator[None]],
) -> None:
    x = start(manager)
    with contextmanager(in_forward)(manager):
        y = region(body, x)
    moved = bytes_moved()
    with contextmanager(in_backward)(manager):
        y.sum().backward()
    assert bytes_moved() == moved
    assert (moved > 0) == (in_forward is as_before)
    del y
    agrees(manager, [x.grad], gradient(body, x))


def test_without_grad(manager: PipelineOffloadManager, region: Region) -> None:
    """A group in a part without grad, in a region without, and evaluation before backward."""

    def partly(x: Tensor) -> Tensor:
        with torch.no_grad():
            constant = group(x.detach().sin(), "constant")
        return torch.tanh(body(x) * constant)

    x = start(manager)
    y = region(partly, x)
    with torch.no_grad():
        region(partly, x)
    y.sum().backward()
    del y
    agrees(manager, [x.grad], gradient(partly, x))


# How backward comes


def test_second_backward(manager: PipelineOffloadManager, region: Region) -> None:
    x = start(manager)
    y = region(body, x).sum()
    moved = bytes_moved()
    found = [torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2)]
    y.backward()
    del y
    assert bytes_moved() == moved
    agrees(manager, [*found, x.grad], 3 * gradient(body, x))


def test_double_backward(manager: PipelineOffloadManager, region: Region) -> None:
    def slope(x: Tensor, run: Region = region) -> Tensor:
        return torch.autograd.grad(run(body, x).sum(), x, create_graph=True)[0]

    x = start(manager)
    slope(x).sum().backward()
    agrees(manager, [x.grad], gradient(partial(slope, run=plainly), x))


def test_recomputed_outside_backward(manager: PipelineOffloadManager, region: Region) -> None:
    """As a debugger does that looks at ``grad_fn``. Nothing is offloaded by it."""
    x = start(manager)
    y = region(body, x)
    chunk = manager.cur_forward_chunk()
    assert chunk is not None
    moved, groups = bytes_moved(), len(chunk.groups)
    for _ in range(2):
        seen = y.grad_fn._saved_result
        assert same_bits([seen], [y.detach()])
        del seen
    assert (bytes_moved(), len(chunk.groups)) == (moved, groups)
    y.sum().backward()
    assert (bytes_moved(), len(chunk.groups)) == (moved, groups)
    del y
    agrees(manager, [x.grad], gradient(body, x))


def test_in_a_reentrant_region(manager: PipelineOffloadManager, region: Region) -> None:
    """Its forward with grad runs in backward, where groups do nothing; nor do they after that."""

    def outer(x: Tensor, run: Region = region) -> Tensor:
        return torch.sin(run(body, torch.sin(x)))

    x = start(manager)
    checkpoint(outer, x, use_reentrant=True).sum().backward()
    agrees(manager, [x.grad], gradient(partial(outer, run=plainly), x))


# How groups come


def test_delayed_groups(manager: PipelineOffloadManager, region: Region) -> None:
    def delayed(x: Tensor) -> Tensor:
        x = group(torch.tanh(x), "a", delay_offload=True)
        return torch.tanh(group(torch.tanh(x), "b", delay_offload=True))

    for flush in (manager.flush_delayed_groups, int):
        x = start(manager)
        y = region(delayed, x)
        flush()
        moved = bytes_moved()
        y.sum().backward()
        manager.flush_delayed_groups()
        assert bytes_moved() == moved
        del y
        agrees(manager, [x.grad], gradient(delayed, x))


@pytest.mark.parametrize("ends_inside", [True, False])
def test_a_group_across_the_border(
    manager: PipelineOffloadManager, region: Region, ends_inside: bool
) -> None:
    """Started in front of the region and committed in it, or committed behind it."""

    def inner(x: Tensor) -> Tensor:
        if not ends_inside:
            with off_interface(True, x, "across") as x:
                x = torch.tanh(x)
        else:
            x = off_interface.group_commit(torch.tanh(x), name="across")
        return torch.tanh(group(torch.sin(x)))

    def across(x: Tensor, run: Region = region) -> Tensor:
        if ends_inside:
            with off_interface(True, x, "across") as x:
                x = torch.tanh(x)
        x = run(inner, x)
        return x if ends_inside else off_interface.group_commit(x, name="across")

    x = start(manager)
    y = across(x)
    moved = bytes_moved()
    y.sum().backward()
    assert bytes_moved() == moved
    del y
    agrees(manager, [x.grad], gradient(partial(across, run=plainly), x))


def test_forced_release(manager: PipelineOffloadManager, region: Region) -> None:
    """Tensors are emptied once, in the forward; what the recomputation made, it needs."""

    def releasing(x: Tensor) -> Tensor:
        x = torch.tanh(x) * 2
        with off_interface(True, x, "g"):
            y = torch.sin(x)
        off_interface.group_commit(y, name="g", forced_released_tensors=[x])
        return torch.tanh(3 * y)

    x = start(manager)
    y = region(releasing, x)
    y.sum().backward()
    del y
    agrees(manager, [x.grad], gradient(releasing, x))


class Boom(Exception):
    """What a recomputation raises."""


def test_a_recomputation_that_fails(manager: PipelineOffloadManager, region: Region) -> None:
    """In the group; no hook is left, and the next step is right."""
    runs: list[int] = []

    def failing(x: Tensor) -> Tensor:
        runs.append(0)
        x = torch.tanh(x)
        with off_interface(True, x, "g"):
            x = torch.sin(x)
            if len(runs) == 2:
                raise Boom
            x = torch.sin(x)
        return torch.tanh(off_interface.group_commit(x, name="g"))

    x = start(manager)
    y = region(failing, x)
    with pytest.raises(Boom):
        y.sum().backward()
    assert hook_depth() == 0
    del y
    x = start(manager)
    region(failing, x).sum().backward()
    agrees(manager, [x.grad], gradient(failing, x))


@pytest.mark.parametrize("place", ["group", "behind", "both"])
def test_compiled_block(place: str, region: Region) -> None:
    """In the group, or behind it."""
    with use_backend(make_backend("cpu"), config=CONFIG) as manager:
        block = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
        compiled = torch.compile(block, backend="aot_eager")

        def mixed(x: Tensor) -> Tensor:
            x = torch.tanh(x)
            with off_interface(True, x, "g"):
                y = (compiled if place != "behind" else block)(torch.sin(x))
            y = off_interface.group_commit(y, name="g")
            return torch.tanh((compiled if place != "group" else block)(y))

        for seed in range(2):
            x = start(manager, seed)
            region(mixed, x).sum().backward()
            assert bytes_moved() > 0
            agrees(manager, [x.grad], gradient(mixed, x))


def test_modules_in_a_sliced_model(backend: Backend) -> None:
    """The checkpoints of :class:`OffloadModel`."""
    device = backend.device
    torch.manual_seed(1)
    nets = [nn.Sequential(nn.Linear(6, 6), Net()) for _ in range(4)]
    off = copy.deepcopy(nn.Sequential(*nets)).to(device)
    on = OffloadModel(
        nn.Sequential(*nets), device, num_slices=2, checkpoint_activation=True, backend=backend
    )
    with use_backend(backend, config=CONFIG) as manager:
        # In its own manager: the groups are those of the layers, not of the slices.
        with offload_modules(on, {"mlp": "*.1.mlp"}):
            for seed in range(2):
                x = start(manager, seed)
                on(x).sum().backward()
                (expected,) = torch.autograd.grad(off(x).sum(), x)
                assert same_bits([x.grad], [expected])
                assert bytes_moved() > 0
                assert_idle(manager)


class Event:
    """What a user of graphs gives: recorded on the stream it is told."""

    def record(self, stream: Any) -> None:
        self.at = stream.record_event()


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("order", ["late", "eager", "random"])
def test_in_a_capture(order: str, early_stop: bool) -> None:
    """Forward and backward are graphs of their own; the recomputation is part of the second."""
    device = SimulatedBackend(order)
    config = OffloadConfig(min_offloaded_tensor_size=1)

    def region(x: Tensor, is_on: bool) -> Tensor:
        with off_interface(is_on, x, "mlp") as x:
            y = torch.tanh(2 * x)
        y = off_interface.group_commit(y, name="mlp") if is_on else y
        return torch.tanh(3 * y).sin()  # saved behind the group, of the same shape

    def step(is_on: bool, capture: Callable[[], Any] = nullcontext) -> Tensor:
        leaf = torch.linspace(-1, 1, 6).requires_grad_()
        if is_on:
            off_interface.reset()
        with capture():
            entered = leaf
            if is_on:
                off_interface.init_chunk_handler(None, None, 1)
                entered = fine_grained_offloading_backward_record(leaf, Event())
            options = {"use_reentrant": False, "early_stop": early_stop}
            loss = checkpoint(region, entered, is_on, **options).sum()
            loss = checkpoint(region, loss * entered, is_on, **options).sum()
            if is_on:
                off_interface.forward_record(Event())
        with capture():
            loss.backward()
        assert leaf.grad is not None
        return leaf.grad

    with use_backend(GraphSafeBackend(device), config=config) as manager:
        expected = step(False)
        assert torch.equal(step(True), expected), "the step that makes host memory"
        before = manager.statistics().bytes_offloaded
        for _ in range(2):
            assert torch.equal(step(True, device.capture), expected)
        assert manager.statistics().bytes_offloaded > before
        assert torch.equal(step(True), expected), "and outside again"
