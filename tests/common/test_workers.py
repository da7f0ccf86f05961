"""Threads that do what is queued: in order, and whatever a signal handler raises where."""

from __future__ import annotations

import sys
import textwrap
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from helpers import processes
from helpers.injected import Injected, files, interrupt_at, num_lines
from helpers.processes import HANG_S

from pp_offload._common import workers as module
from pp_offload._common.workers import Workers
from pp_offload.errors import OffloadError

LINES = files("_common/workers")


def is_done_soon(piece: module.Piece) -> bool:
    """Asked by another thread, which an interrupt cannot reach."""
    waiting = threading.Thread(target=piece.wait, daemon=True)
    waiting.start()
    waiting.join(HANG_S)
    return piece.done()


def test_work_is_done_in_order_after_a_start_that_was_cut_off() -> None:
    total = num_lines(LINES, lambda: Workers("test").submit(lambda: None).wait())
    assert total > 10
    for number in range(1, total + 1):
        workers = Workers("test")
        with suppress(Injected), interrupt_at(number, LINES):
            workers.submit(lambda: None).wait()
        pieces = [workers.submit(lambda n=n: n) for n in range(3)]
        assert all(map(is_done_soon, pieces)), number
        assert [piece.result() for piece in pieces] == [0, 1, 2]
        workers.shutdown()


@pytest.mark.parametrize("num_started", [0, 1])
def test_the_threads_that_the_system_allows_do_the_work(
    num_started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, start, rest = Workers("test", num_threads=3), threading.Thread.start, [num_started]

    def start_few(thread: threading.Thread) -> None:
        if not rest[0]:
            raise RuntimeError("can't start new thread")
        rest[0] -= 1
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_few)
        if num_started:
            assert workers.submit(lambda: 7).result() == 7
        else:
            with pytest.raises(OffloadError, match="can't start new thread; raise .* .ulimit -u"):
                workers.submit(lambda: 7)
    assert workers.submit(lambda: 8).result() == 8
    workers.shutdown()


def test_a_shutdown_after_an_interrupted_one_waits_for_the_work() -> None:
    total = num_lines(LINES, Workers("test").shutdown)
    for number in range(1, total + 5):
        workers, gate = Workers("test"), threading.Event()
        piece = workers.submit(partial(gate.wait, 0.2))  # it ends later than a call that waits not
        with suppress(Injected), interrupt_at(number, LINES):
            workers.shutdown()
        workers.shutdown()
        assert piece.done(), number


def run_to_the_end(code: str, tmp_path: Path) -> str:
    program = textwrap.dedent(code)
    result = processes.run([sys.executable, "-c", program], tmp_path)
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


def test_no_thread_is_inside_torch_when_python_ends(tmp_path: Path) -> None:
    """Each copy gives the interpreter's lock up, so one is always about to take it again."""
    output = run_to_the_end(
        """
        import torch
        from pp_offload._common.workers import Workers, inside_torch
        torch.set_num_threads(1)
        source, target = torch.ones(2**16), torch.ones(2**16)

        def copy():
            while True:
                with inside_torch():
                    target.copy_(source)

        workers = Workers("copies", num_threads=4)
        pieces = [workers.submit(copy) for _ in range(4)]
        print("over")
        """,
        tmp_path,
    )
    assert output == "over\n"


def test_who_asks_for_work_when_the_process_ends_hears_of_it(tmp_path: Path) -> None:
    """By a function that runs after ours, for it was registered before."""
    output = run_to_the_end(
        """
        import atexit
        atexit.register(lambda: late())
        import threading
        from pp_offload._common.workers import Workers
        from pp_offload.errors import ClosedError

        def late():
            for ask in (pieces[0].result, lambda: workers.submit(print)):
                try:
                    ask()
                except ClosedError as error:
                    print("the process ends" in str(error))

        workers = Workers("stuck")
        pieces = [workers.submit(threading.Event().wait)]
        """,
        tmp_path,
    )
    assert output == "True\nTrue\n"


def test_a_forked_process_ends_though_a_thread_was_inside_torch(tmp_path: Path) -> None:
    output = run_to_the_end(
        """
        import os, sys, threading
        from pp_offload._common.workers import Workers, inside_torch

        def stay():
            with inside_torch():
                is_inside.set()
                gate.wait()

        is_inside, gate, workers = threading.Event(), threading.Event(), Workers("one")
        piece = workers.submit(stay)
        is_inside.wait()
        child = os.fork()
        if child == 0:
            sys.exit(7)
        status = os.waitpid(child, 0)[1]
        print(os.waitstatus_to_exitcode(status))
        gate.set()
        piece.result()
        """,
        tmp_path,
    )
    assert output == "7\n"
