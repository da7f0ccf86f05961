"""F10: what a side stream or a collective produces is not copied before it is there."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import BACKENDS, ON_THE_HOST, make_backend
from field_checks import make_inputs, on_stream, side_stream
from processes import HANG_S
from torch import Tensor, nn
from torch._C._distributed_c10d import _register_work
from torch.distributed._functional_collectives import AsyncCollectiveTensor, wait_tensor
from toy import assert_idle, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, RaceError, use_backend
from pp_offload.backends import Backend

pytestmark = pytest.mark.field("F10")

ON_STREAMS = [kind for kind in BACKENDS if not str(kind).startswith("cpu")]
CONFIG = OffloadConfig(min_offloaded_tensor_size=1)


class SideStream:
    """A stream of communication next to the compute stream."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.compute: Any = backend.current_stream()
        self.stream: Any = side_stream(backend)

    def inside(self) -> AbstractContextManager[object]:
        return on_stream(self._backend, self.stream)


def microbatch(
    side: SideStream, x: Tensor, weights: list[Tensor], when: str, is_on: bool
) -> Tensor:
    """A group that saves what the side stream makes of the input; its output."""
    if is_on:
        off_interface.init_chunk_handler(None, None, 1)
    side.stream.wait_stream(side.compute)
    with off_interface(is_on, x, "core"):
        y = torch.sin(x * weights[0])
        with side.inside():
            produced = x * 3
            is_there = side.stream.record_event()
            if when == "after the commit":
                z = produced * weights[1]
            elif when == "after the commit, gathered":
                z = produced[:, ::3] * weights[1][:, ::3]
        if when == "before it is saved":
            side.compute.wait_event(is_there)
        if not when.startswith("after"):
            z = produced * weights[1]
    y = off_interface.group_commit(y, name="core") if is_on else y
    del produced
    side.compute.wait_stream(side.stream)
    return y.sum() + z.sum()


def gradients(side: SideStream, backend: Backend, when: str, is_on: bool) -> list[Tensor]:
    """Of one step of three microbatches, two of them in pending."""
    if is_on:
        off_interface.reset()
    *inputs, v, w = make_inputs(5, device=backend.device)
    weights: list[Tensor] = [nn.Parameter(v), nn.Parameter(w)]
    losses = []
    for x in inputs:
        losses.append(microbatch(side, x, weights, when, is_on))
        if len(losses) == 2:
            losses.pop(0).backward()
    losses.pop().backward()
    return [weight.grad for weight in weights]


@pytest.mark.parametrize("kind", ON_STREAMS)
@pytest.mark.parametrize(
    ("when", "max_in_flight_bytes"),
    [
        ("before it is saved", 2**20),
        ("after the commit", 2**20),
        ("after the commit", 1),
        ("after the commit, gathered", 2**20),
        ("after the commit, gathered", 1),
    ],
)
def test_handed_over_by_an_event(kind: str, when: str, max_in_flight_bytes: int) -> None:
    config = OffloadConfig(min_offloaded_tensor_size=1, max_in_flight_bytes=max_in_flight_bytes)
    with use_backend(make_backend(kind), config=config) as manager:
        backend = manager.backend
        side = SideStream(backend)
        for step in range(3):
            got = gradients(side, backend, when, True)
            assert same_bits(got, gradients(side, backend, when, False)), step
            assert_idle(manager)
        assert manager.statistics().bytes_offloaded > 0


@pytest.mark.parametrize("kind", [kind for kind in ON_STREAMS if isinstance(kind, str)])
def test_never_handed_over_is_seen(kind: str) -> None:
    """The scenario above is one in which the simulated device notices a missing wait."""
    backend = make_backend(kind)
    with pytest.raises(RaceError, match="side"), use_backend(backend, config=CONFIG):
        gradients(SideStream(backend), backend, "never", True)


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


def summed_later(ranks: list[Any], x: Tensor) -> AsyncCollectiveTensor:
    """The sum of ``x`` and of what the other rank brings, when it does."""
    work = ranks[0].allreduce([x])
    _register_work(x, work)
    return AsyncCollectiveTensor(x)


@pytest.mark.parametrize("kind", ON_THE_HOST)
@pytest.mark.parametrize("shape", [(4, 6), (6, 4)], ids=["as it is", "a view"])
def test_async_collective_tensor(kind: str, shape: tuple[int, int], ranks: list[Any]) -> None:
    """Saved while the collective runs: nobody waits for it, and backward gets the sum."""
    with use_backend(make_backend(kind), config=CONFIG) as manager:
        for step in range(3):
            mine, theirs, other = make_inputs(3, step=step)
            expected = (mine + theirs).view(shape)
            weights = [nn.Parameter(torch.ones(shape)) for _ in range(2)]
            off_interface.reset()
            off_interface.init_chunk_handler(None, None, 1)
            total = summed_later(ranks, mine.clone()).view(shape)
            with off_interface(True, other, "core"):
                y = SavesUnread.apply(weights[0], total) + other.view(shape) * weights[1]
            y = off_interface.group_commit(y, name="core")
            assert not total.completed
            ranks[1].allreduce([theirs.clone()])
            y.sum().backward()
            assert same_bits([w.grad for w in weights], [expected, other.view(shape)]), step
            del y, total
            assert_idle(manager)


@pytest.mark.parametrize("kind", ON_THE_HOST)
def test_waited_for_in_the_group(kind: str, ranks: list[Any]) -> None:
    """An operation that reads it waits; what it waited for is an activation as any other."""
    with use_backend(make_backend(kind), config=CONFIG) as manager:
        for step in range(3):
            mine, theirs = make_inputs(2, step=step)
            weights = [nn.Parameter(torch.ones(4, 6)) for _ in range(2)]
            off_interface.reset()
            off_interface.init_chunk_handler(None, None, 1)
            total = summed_later(ranks, mine.clone())
            ranks[1].allreduce([theirs.clone()])
            with off_interface(True, total, "core"):
                y = total * weights[0] + wait_tensor(total) * weights[1]
            y = off_interface.group_commit(y, name="core")
            del total
            y.sum().backward()
            assert same_bits([w.grad for w in weights], [mine + theirs] * 2), step
            del y
            assert_idle(manager)
        assert manager.statistics().bytes_offloaded > 0
