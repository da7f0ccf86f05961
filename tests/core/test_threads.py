"""Several threads through one manager, and a fork: right in every bit, or a clear error.

The simulated device follows one thread, so these run on the host with copies inline or on threads.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from helpers.forks import statuses
from helpers.nets import Net, inputs
from helpers.sessions import (
    assert_idle,
    assert_same,
    begin_microbatch,
    begin_step,
    frequent_switches,
    gradients,
    session,
)
from helpers.threaded import at_once
from torch import Tensor

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import ForkedError, PipelineOffloadManager

LIMIT_S = 300
"""Nothing here takes a second; behind this it hangs."""

NUM = 4
STEPS = 5

kinds = pytest.mark.parametrize("kind", ["cpu", "threads"])


def microbatch(net: Net, x: Tensor, is_on: bool) -> tuple[Tensor, Tensor]:
    """Input and loss."""
    net.is_on = is_on
    if is_on:
        begin_microbatch()
    leaf = x.clone().requires_grad_()
    return leaf, net(leaf).square().mean()


def backward(net: Net, leaf: Tensor, loss: Tensor) -> list[Tensor]:
    loss.backward()
    return [*gradients(leaf), *gradients(*net.parameters())]


@pytest.mark.field("F54")
@kinds
@pytest.mark.parametrize("window", [2**12, 2**20])
def test_a_model_for_each_thread(kind: str, window: int) -> None:
    """All within one step, each with lengths of its own."""
    xs = [[inputs(1, step=step, rows=2 + step + n)[0] for step in range(STEPS)] for n in range(NUM)]
    nets = [Net(seed=n) for n in range(NUM)]

    def run(number: int, is_on: bool) -> list[Tensor]:
        results: list[Tensor] = []
        for x in xs[number]:
            results += backward(nets[number], *microbatch(nets[number], x, is_on))
        return results

    expected = [run(n, False) for n in range(NUM)]
    options: dict[str, Any] = {"prefetch_bytes": window, "max_in_flight_bytes": window}
    with frequent_switches(), session(kind, **options) as manager:
        for _ in range(3):
            off_interface.reset()
            results = at_once([partial(run, n, True) for n in range(NUM)])
            for got, right in zip(results, expected, strict=True):
                assert_same(got, right)
        off_interface.reset()
        assert manager.statistics().bytes_offloaded > 0
        assert_idle(manager)


@kinds
def test_graphs_of_one_thread_backward_in_several(kind: str) -> None:
    nets = [Net(seed=n) for n in range(NUM)]
    (x,) = inputs(1)
    expected = [backward(net, *microbatch(net, x, False)) for net in nets]
    with frequent_switches(), session(kind) as manager:
        for _ in range(STEPS):
            off_interface.reset()
            graphs = [(net, *microbatch(net, x, True)) for net in nets]
            results = at_once([partial(backward, *graph) for graph in graphs])
            for got, right in zip(results, expected, strict=True):
                assert_same(got, right)
            graphs.clear()
        off_interface.reset()
        assert_idle(manager)


@kinds
def test_one_graph_backward_in_several_threads(kind: str) -> None:
    """Heads on one trunk: its saved tensors are asked for by all threads."""
    net = Net()
    (x,) = inputs(1)

    def heads(is_on: bool) -> tuple[Tensor, list[Tensor]]:
        net.is_on = is_on
        if is_on:
            begin_step()
        leaf = x.clone().requires_grad_()
        h = net(leaf)
        return leaf, [(h * (n + 1)).square().sum() for n in range(NUM)]

    def grad(leaf: Tensor, y: Tensor) -> Tensor:
        return torch.autograd.grad(y, leaf, retain_graph=True)[0]

    leaf, ys = heads(False)
    expected = [grad(leaf, y) for y in ys]
    with frequent_switches(), session(kind) as manager:
        for _ in range(STEPS):
            leaf, ys = heads(True)
            assert_same(at_once([partial(grad, leaf, y) for y in ys]), expected)
        del leaf, ys
        off_interface.reset()
        assert_idle(manager)


@pytest.mark.field("F58")
@kinds
def test_a_forked_process(kind: str) -> None:
    """It trains; a graph of its parent raises ForkedError there, and is good in the parent."""
    net, (x,) = Net(), inputs(1)
    leaf, loss = microbatch(net, x, False)
    expected = backward(net, leaf, loss)
    with session(kind) as manager:

        def step() -> list[Tensor]:
            begin_step()
            return backward(net, *microbatch(net, x, True))

        assert_same(step(), expected)
        begin_step()
        graphs = [microbatch(net, x, True)]

        def child() -> None:
            with pytest.raises(ForkedError) as refusal:
                backward(net, *graphs[0])
            assert str(os.getpid()) in str(refusal.value) and str(os.getppid()) in str(
                refusal.value
            )
            net.zero_grad()
            for _ in range(2):
                assert_same(step(), expected)
            assert_idle(PipelineOffloadManager.get_instance())

        with ThreadPoolExecutor(1) as worker:
            lock = manager.offloader.lock
            worker.submit(lock.acquire).result(LIMIT_S)  # the child has no thread to release it
            ended = statuses([child])
            worker.submit(lock.release).result(LIMIT_S)
        assert ended == [0]
        assert_same(backward(net, *graphs[0]), expected)
        graphs.clear()
        assert_same(step(), expected)
        assert_idle(manager)


@kinds
def test_a_forward_that_failed_on_a_thread_that_lives_on_ends_no_step(kind: str) -> None:
    """It raised between a group and its commit; the thread has begun another microbatch."""

    def fails() -> None:
        begin_microbatch()
        with off_interface(True, inputs(1)[0].requires_grad_(), "part") as x:
            x.sin()
        raise ArithmeticError

    with session(kind) as manager, ThreadPoolExecutor(1) as worker:
        begin_step()
        failed = worker.submit(fails)
        assert isinstance(failed.exception(LIMIT_S), ArithmeticError)
        net, (x,) = Net(), inputs(1)
        leaf, loss = worker.submit(microbatch, net, x, True).result(LIMIT_S)
        got = worker.submit(backward, net, leaf, loss).result(LIMIT_S)
        off_interface.reset()
        assert_same(got, backward(net, *microbatch(net, x, False)))
        assert_idle(manager)
