"""Copies wait for what they need: F01, F02, F07, F08, F10."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import ACCELERATORS, ON_THE_HOST, make_backend
from helpers.processes import HANG_S
from helpers.scenarios import (
    Chain,
    begin,
    check_moves,
    check_steps,
    make_inputs,
    manager_on,
    on_stream,
    ordered,
    schedule,
    side_stream,
)
from helpers.sessions import gradients, group, settle
from helpers.toy import assert_idle, same_bits
from torch import Tensor, nn
from torch._C._distributed_c10d import _register_work
from torch.distributed._functional_collectives import AsyncCollectiveTensor, wait_tensor

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    OffloadActivations,
    PipelineOffloadManager,
)
from pp_offload.backends import Backend

with_streams = pytest.mark.parametrize("kind", ["late", "random", *ACCELERATORS])


@pytest.mark.field("F01")
@ordered
@pytest.mark.parametrize("prefetch_bytes", [0, 2**20], ids=["on demand", "prefetch"])
def test_the_first_iteration_reads_what_was_written(backend: Backend, prefetch_bytes: int) -> None:
    for groups, microbatches, ahead in [(1, 2, 1), (1, 3, 3), (2, 4, 2), (3, 3, 1), (3, 4, 4)]:
        with manager_on(backend, prefetch_bytes=prefetch_bytes) as manager:
            inputs = make_inputs(microbatches, device=backend.device)
            chain = Chain("abc"[:groups], 1, device=backend.device)
            assert check_moves(manager, chain, inputs, schedule(microbatches, ahead)) > 0
            statistics = manager.statistics()
            assert statistics.on_demand_reloads + statistics.taken_back > 0
            if prefetch_bytes and (groups > 1 or ahead > 1):
                assert statistics.prefetched_reloads + statistics.taken_back > 0


@pytest.mark.field("F02")
@ordered
@pytest.mark.parametrize(("ranks", "vp_size", "rank"), [(4, 1, 0), (2, 2, 0), (2, 2, 1)])
def test_a_buffer_is_written_behind_its_readers(
    manager: PipelineOffloadManager, ranks: int, vp_size: int, rank: int
) -> None:
    """Another length in every step, in 1F1B and interleaved schedules."""
    ahead = ranks - rank + (vp_size > 1) * (ranks - rank - 1 + (vp_size - 1) * ranks)
    device = manager.backend.device
    stages = [Chain(layers=2, device=device, seed=seed) for seed in range(vp_size)]
    for step, length in enumerate((4, 7, 3, 6)):
        inputs = make_inputs(8, step=step, length=length, device=device)
        check_moves(manager, stages, inputs, schedule(8, ahead, vp_size, ranks))


@pytest.mark.field("F02")
@pytest.mark.parametrize("kind", ["late", "random"])
def test_what_came_ahead_for_nothing_is_read_before_its_buffer_is_written(kind: str) -> None:
    """Graphs die behind the backward of a part; the next microbatch gets their host memory."""
    with manager_on(make_backend(kind), prefetch_bytes=2**20, host_budget_bytes=2**17) as manager:
        chain = Chain(layers=1)

        def step(is_on: bool, number: int) -> list[Tensor]:
            chain.is_on, results = is_on, []
            for length in (700, 300, 600, 700):
                begin(is_on)
                (x,) = make_inputs(1, step=number, length=length)
                loss = chain(x).square().mean()
                settle(manager)
                results += torch.autograd.grad(loss, chain.weights[-1])
                del loss
            return results

        check_steps(manager, step)


class SideStreams:
    """Two compute streams beside the default one, ordered with it by waits."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.main = backend, backend.current_stream()
        self.sides: list[Any] = [side_stream(backend) for _ in range(2)]

    def on(self, index: int) -> AbstractContextManager[object]:
        return on_stream(self.backend, self.sides[index])

    def fork(self) -> None:
        """The side streams wait for all that was done elsewhere."""
        for side in self.sides:
            for other in (self.main, *self.sides):
                if other is not side:
                    side.wait_stream(other)

    def join(self) -> None:
        for side in self.sides:
            self.main.wait_stream(side)


@pytest.mark.field("F07")
@with_streams
@pytest.mark.parametrize("is_context", [False, True], ids=["groups", "context"])
@pytest.mark.parametrize(
    ("forward", "backward"),
    [((0,), (0,)), ((0, 1), (1, 0)), ((0, 1), (0,))],
    ids=["one side stream", "crossed", "gathered"],
)
def test_waits_go_to_the_live_stream(
    kind: str, is_context: bool, forward: tuple[int, ...], backward: tuple[int, ...]
) -> None:
    """Two microbatches in flight; the streams of forward and of backward differ."""
    with manager_on(make_backend(kind)) as manager:
        device, streams = manager.backend.device, SideStreams(manager.backend)
        context = OffloadActivations(
            min_offload_size=1, max_fwd_stash_size=3, backend=manager.backend
        )
        chain = Chain(layers=2, device=device)

        def step(is_on: bool, number: int) -> list[Tensor]:
            chain.is_on = is_on and not is_context
            leaves = make_inputs(4, step=number, length=3 + number, device=device)
            waiting: list[Tensor] = []
            streams.fork()
            for m in range(len(leaves) + 1):
                if m < len(leaves):
                    with (
                        streams.on(forward[m % len(forward)]),
                        context if is_on and is_context else nullcontext(),
                    ):
                        begin(chain.is_on)
                        waiting.append(chain(leaves[m].requires_grad_()).square().mean())
                if m > 0:
                    streams.fork()
                    with streams.on(backward[(m - 1) % len(backward)]):
                        waiting.pop(0).backward()
            streams.join()
            return gradients(*leaves, *chain.parameters())

        check_steps(context if is_context else manager, step)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "offset 1": lambda t: t.view(-1)[1:],
    "every other column": lambda t: t[:, ::2],
    "columns, expanded": lambda t: t[:, 1:2].expand(-1, 9),
    "padded rows": lambda t: t[:, :5],
    "scalar": lambda t: t[2, 3],
}


@pytest.mark.field("F08")
@pytest.mark.covering(2)
@ordered
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gathered_view_is_ordered_with_compute(
    manager: PipelineOffloadManager,
    activations: OffloadActivations,
    view: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
) -> None:
    device = manager.backend.device
    activations.stash.max_tensors = 1

    def program(is_on: bool, step: int, *, context: bool = False) -> list[Tensor]:
        x = make_inputs(1, step=step, width=8, length=6, device=device)[0].to(dtype)
        x.requires_grad_()
        begin(is_on and not context)
        total = 0
        for name in "ab":
            h = x * 3
            with activations if is_on and context else nullcontext():
                y = group(h, lambda h: view(h).sin(), is_on and not context, name)
            del h
            total = total + y.sum()
        noise = torch.full((6, 8), 7.0, device=device)  # where what was freed had been
        total.backward()
        del noise
        return [total.detach(), x.grad]

    check_steps(manager, program)
    check_steps(activations, lambda is_on, step: program(is_on, step, context=True))


def produced_aside(manager: PipelineOffloadManager, when: str, is_on: bool) -> list[Tensor]:
    """Groups that save what a side stream produces, in three microbatches, two in flight."""
    side: Any = side_stream(manager.backend)
    compute: Any = manager.backend.current_stream()
    *inputs, v, w = make_inputs(5, device=manager.backend.device)
    weights = [nn.Parameter(v), nn.Parameter(w)]
    losses: list[Tensor] = []
    for x in inputs:
        begin(is_on)
        side.wait_stream(compute)
        with off_interface(is_on, x, "core"):
            y = torch.sin(x * weights[0])
            with on_stream(manager.backend, side):
                produced = x * 3
                is_there = side.record_event()
                if when == "after the commit":
                    z = produced[:, ::3] * weights[1][:, ::3]
            if when == "before it is saved":
                compute.wait_event(is_there)
            if when != "after the commit":
                z = produced * weights[1]
        y = off_interface.group_commit(y, name="core") if is_on else y
        del produced
        compute.wait_stream(side)
        losses.append(y.sum() + z.sum())
        if len(losses) == 2:
            losses.pop(0).backward()
    losses.pop().backward()
    return gradients(*weights)


@pytest.mark.field("F10")
@with_streams
@pytest.mark.parametrize(
    ("when", "max_in_flight_bytes"),
    [("before it is saved", 2**20), ("after the commit", 2**20), ("after the commit", 1)],
)
def test_what_a_side_stream_produces(kind: str, when: str, max_in_flight_bytes: int) -> None:
    with manager_on(make_backend(kind), max_in_flight_bytes=max_in_flight_bytes) as manager:
        check_steps(manager, lambda is_on, step: produced_aside(manager, when, is_on))


class SavesUnread(torch.autograd.Function):
    """``w`` times ``other``, which is saved before anything waits for it."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(other)
        return w.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.saved_tensors[0], None


@pytest.fixture
def ranks() -> Iterator[list[Any]]:
    """Both ranks of a gloo group, in this process: a collective ends when the second joins."""
    store, timeout = dist.HashStore(), timedelta(seconds=HANG_S)
    with ThreadPoolExecutor(2) as threads:
        yield list(threads.map(lambda r: dist.ProcessGroupGloo(store, r, 2, timeout), range(2)))


@pytest.mark.field("F10")
@pytest.mark.parametrize("kind", ON_THE_HOST[1:3])
@pytest.mark.parametrize("is_waited_for", [False, True])
def test_what_a_collective_produces(kind: str, is_waited_for: bool, ranks: list[Any]) -> None:
    """Saved while the collective runs, or read in the group, which waits: backward gets the sum."""
    with manager_on(make_backend(kind)) as manager:
        for step in range(3):
            mine, theirs, other = make_inputs(3, step=step)
            weights = [nn.Parameter(torch.ones(4, 6)) for _ in range(2)]
            manager.reset()
            begin()
            shared = mine.clone()
            _register_work(shared, ranks[0].allreduce([shared]))
            total = AsyncCollectiveTensor(shared)
            if is_waited_for:
                ranks[1].allreduce([theirs.clone()])
            with off_interface(True, other, "core"):
                y = wait_tensor(total) * weights[0] if is_waited_for else 0
                y = SavesUnread.apply(weights[0], total) + y + other * weights[1]
            y = off_interface.group_commit(y, name="core")
            if not is_waited_for:
                assert not total.completed
                ranks[1].allreduce([theirs.clone()])
            y.sum().backward()
            expected = (mine + theirs) * (2 if is_waited_for else 1)
            assert same_bits(gradients(*weights), [expected, other]), step
            del y, total
            assert_idle(manager)
