"""Several threads through one manager, and a fork: right in every bit, or a clear error.

The simulated device follows one thread, so these run on the host with copies inline or on threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from helpers.nets import Net, inputs
from helpers.processes import status_of
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
from pp_offload._common.workers import Piece, Workers
from pp_offload.backends.cpu import CopyStream

LIMIT_S = 300
"""Nothing here takes a second; behind this it hangs."""

NUM = 4

kinds = pytest.mark.parametrize("kind", ["cpu", "threads"])


def microbatch(net: Net, x: Tensor, is_on: bool) -> tuple[Tensor, Tensor]:
    """Input and loss."""
    net.is_on = is_on
    begin_microbatch(is_on)
    leaf = x.clone().requires_grad_()
    return leaf, net(leaf).square().mean()


def backward(net: Net, leaf: Tensor, loss: Tensor) -> list[Tensor]:
    loss.backward()
    return [*gradients(leaf), *gradients(*net.parameters())]


Work = list[Callable[[], Sequence[Tensor]]]


def check_threads(kind: str, work: Callable[[bool], Work]) -> None:
    """Each piece of the work of a step, on a thread of its own, has the results without offload."""
    expected = [piece() for piece in work(False)]
    with frequent_switches(), session(kind) as manager:
        for _ in range(5):
            off_interface.reset()
            for got, right in zip(at_once(work(True)), expected, strict=True):
                assert_same(got, right)
        off_interface.reset()
        assert manager.statistics().bytes_offloaded > 0
        assert_idle(manager)


@kinds
def test_graphs_of_one_thread_backward_in_several(kind: str) -> None:
    nets, (x,) = [Net(seed=n) for n in range(NUM)], inputs(1)
    check_threads(
        kind, lambda on: [partial(backward, net, *microbatch(net, x, on)) for net in nets]
    )


@kinds
def test_one_graph_backward_in_several_threads(kind: str) -> None:
    """Heads on one trunk: its saved tensors are asked for by all threads."""
    net = Net()

    def heads(is_on: bool) -> Work:
        net.is_on = is_on
        begin_microbatch(is_on)
        leaf = inputs(1)[0].requires_grad_()
        h = net(leaf)
        ys = [(h * (n + 1)).square().sum() for n in range(NUM)]
        return [partial(torch.autograd.grad, y, leaf, retain_graph=True) for y in ys]

    check_threads(kind, heads)


@pytest.mark.field("F58")
@kinds
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_forked_process(kind: str, tier: str) -> None:
    """It trains; a graph of its parent raises ForkedError there, and is good in the parent."""
    net, (x,) = Net(), inputs(1)
    leaf, loss = microbatch(net, x, False)
    expected = backward(net, leaf, loss)
    with session(kind, tiers=(tier,)) as manager:

        def step() -> list[Tensor]:
            begin_step()
            return backward(net, *microbatch(net, x, True))

        assert_same(step(), expected)
        begin_step()
        graphs = [microbatch(net, x, True)]

        def child() -> None:
            with pytest.raises(ForkedError) as refusal:
                backward(net, *graphs[0])
            assert all(str(pid) in str(refusal.value) for pid in (os.getpid(), os.getppid()))
            net.zero_grad()
            for _ in range(2):
                assert_same(step(), expected)
            assert_idle(PipelineOffloadManager.get_instance())

        with ThreadPoolExecutor(1) as worker:
            lock = manager.offloader.lock
            worker.submit(lock.acquire).result(LIMIT_S)  # the child has no thread to release it
            ended = status_of(child)
            worker.submit(lock.release).result(LIMIT_S)
        assert ended == 0
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


WAITS_S = 0.3
"""So long the other thread may take to come in between; where it is kept out, all of it passes."""


def test_an_event_is_behind_what_its_thread_has_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another engine, with a lock of its own, queues work at the same time."""
    stream, may_run, others_ran = CopyStream("d2h"), threading.Event(), threading.Event()
    other, queue = threading.Thread(target=stream.submit, args=(others_ran.set,)), Workers.queue

    def queue_late(workers: Workers, piece: Piece) -> None:
        if threading.current_thread() is not other:
            other.start()
            others_ran.wait(WAITS_S)
        queue(workers, piece)

    monkeypatch.setattr(Workers, "queue", queue_late)
    stream.submit(may_run.wait)
    event = stream.record_event()
    assert not event.query()
    may_run.set()
    event.synchronize()
    other.join()
    stream.record_event().synchronize()
    assert others_ran.is_set()
