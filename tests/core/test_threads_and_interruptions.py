"""Promise 4: several threads, a fork, and whatever cuts a step off: the next step is right."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from helpers.processes import status_of
from helpers.saving import Raises
from helpers.sessions import (
    assert_idle,
    assert_no_hooks,
    assert_same,
    begin_microbatch,
    begin_step,
    drawn,
    frequent_switches,
    gradients,
    session,
)
from helpers.threaded import at_once
from helpers.toy import Net, inputs, train
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    ForkedError,
    OffloadActivations,
    PipelineOffloadManager,
    fine_grained_offloading_group_start,
    offload_modules,
)
from pp_offload._common.workers import Piece, Workers
from pp_offload.backends.cpu import CopyStream

LIMIT_S = 300
"""Nothing here takes a second; behind this it hangs."""

NUM = 4

kinds = pytest.mark.parametrize("kind", ["cpu", "threads"])
"""The simulated device follows one thread: copies of several are inline, or on threads."""


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


# Whatever cuts a step off leaves nothing behind


def in_the_body(x: Tensor, error: type[BaseException]) -> None:
    with off_interface(True, Net()(x), "fails") as h:
        h.sin()
        raise error


def between_start_and_commit(x: Tensor, error: type[BaseException]) -> None:
    h = Net()(x)
    with off_interface(True, h, "attn") as h:
        h.sin()
    raise error


def behind_a_commit(x: Tensor, error: type[BaseException]) -> None:
    y = Net()(x)
    begin_microbatch()
    Net()(x).sum().backward()
    del y
    raise error


def in_backward(x: Tensor, error: type[BaseException]) -> None:
    net = Net()
    net(Raises.apply(net(x), error)).sum().backward()


def in_a_scope(x: Tensor, error: type[BaseException]) -> None:
    fine_grained_offloading_group_start(x, "fails")
    with off_interface.get_context(True):
        raise error


def in_a_module(x: Tensor, error: type[BaseException]) -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise error

    model = nn.Sequential(nn.Tanh(), Fails())
    with offload_modules(model, {"attn": "0", "fails": "1"}):
        model(x)


def in_a_context(x: Tensor, error: type[BaseException]) -> None:
    backend = PipelineOffloadManager.get_instance().backend
    with OffloadActivations(min_offload_size=1, backend=backend):
        x.sin()
        raise error


def in_the_copy(x: Tensor, error: type[BaseException]) -> None:
    """The device refuses a copy."""
    backend: Any = PipelineOffloadManager.get_instance().backend

    def fail(*_: object) -> None:
        raise error

    backend.copy = fail
    try:
        Net()(x).sum().backward()
    finally:
        del backend.copy


FAILURES = [
    in_the_body,
    between_start_and_commit,
    behind_a_commit,
    in_backward,
    in_a_scope,
    in_a_module,
    in_a_context,
    in_the_copy,
]


@pytest.mark.field("F18")
@pytest.mark.parametrize(
    ("kind", "error"), [("late", KeyboardInterrupt), ("threads", ArithmeticError)]
)
@pytest.mark.parametrize("fails", FAILURES)
def test_the_step_behind_an_aborted_one_is_right(
    kind: str,
    error: type[BaseException],
    fails: Callable[[Tensor, type[BaseException]], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Twice in a row, behind a step that was complete; hooks of others stay, and no warning of a
    group follows the error.
    """
    net, seen = Net(), list[Tensor]()
    expected = [train(net, inputs(3, step=step), False, ahead=2) for step in range(3)]
    with session(kind) as manager:
        assert_same(train(net, inputs(3), True, ahead=2), expected[0])
        for _ in range(2):
            begin_step()
            theirs = saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t)
            with theirs:
                with pytest.raises(error):
                    fails(inputs(1)[0].requires_grad_(), error)
                off_interface.reset()
                seen.clear()
                drawn(2, 2).requires_grad_().exp()
                assert len(seen) == 1, "the hooks of others are the innermost ones again"
            assert_no_hooks()
        seen.clear()
        assert_idle(manager)
        for step in (1, 2):
            assert_same(train(net, inputs(3, step=step), True, ahead=2), expected[step])
            assert_idle(manager)
        manager.reset()
    assert "group '" not in caplog.text
