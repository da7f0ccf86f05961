"""Forks while a graph is alive; what child and parent do with it. Run by test_threads.py."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable

import torch
from helpers.nets import Net, inputs, train
from helpers.sessions import assert_idle, assert_same, begin_step, gradients, session
from torch import Tensor

from pp_offload import ForkedError, PipelineOffloadManager

CHILD_LIMIT_S = 120


def in_child(work: Callable[[], None]) -> None:
    """Run ``work`` in a forked process, which is ended if it hangs."""
    pid = os.fork()
    if pid == 0:
        code = 1
        signal.alarm(CHILD_LIMIT_S)
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 0, status


def graph(net: Net, is_on: bool) -> tuple[Tensor, Tensor]:
    """Input and loss of one microbatch."""
    if is_on:
        begin_step()
    net.is_on = is_on
    leaf = inputs(1)[0].requires_grad_()
    return leaf, net(leaf).sum()


def fork_on(kind: str) -> None:
    """The child cannot use the parent's graph, and trains; the parent goes on as if alone."""
    net, xs = Net(), inputs(3)
    expected = train(net, xs, False, ahead=2)
    leaf, living = graph(net, False)
    living.backward()
    plain = gradients(leaf)
    net.zero_grad()
    with session(kind):
        assert_same(train(net, xs, True, ahead=2), expected)
        leaf, living = graph(net, True)

        def child() -> None:
            try:
                living.backward()
            except ForkedError as refusal:
                assert str(os.getpid()) in str(refusal) and str(os.getppid()) in str(refusal)
            else:
                raise AssertionError("a graph of the other process was used")
            net.zero_grad()
            for _ in range(2):
                assert_same(train(net, xs, True, ahead=2), expected)
            assert_idle(PipelineOffloadManager.get_instance())

        in_child(child)
        print(f"{kind}:child", flush=True)
        living.backward()
        assert_same(gradients(leaf), plain)
        net.zero_grad()
        assert_same(train(net, xs, True, ahead=2), expected)
        print(f"{kind}:parent", flush=True)


def main() -> None:
    """On each kind of host backend."""
    torch.set_num_threads(1)
    for kind in ("cpu", "threads"):
        fork_on(kind)
