"""Threads that do all that is queued, whatever interrupts them."""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from pathlib import Path

from helpers.injected import Injected, files, interrupt_at, points_in
from helpers.processes import HANG_S, run_each

from pp_offload._common import workers as module
from pp_offload._common.workers import Workers

LINES = files("_common/workers")


def is_done_soon(piece: module.Piece) -> bool:
    """Asked by another thread, which an interrupt cannot reach."""
    waiting = threading.Thread(target=piece.wait, daemon=True)
    waiting.start()
    waiting.join(HANG_S)
    return piece.done()


def test_work_is_done_in_order_after_a_start_that_was_cut_off() -> None:
    total = len(points_in(LINES, lambda: Workers("test").submit(lambda: None).wait()))
    assert total > 10
    for number in range(1, total + 1):
        workers = Workers("test")
        with suppress(Injected), interrupt_at(number, LINES):
            workers.submit(lambda: None).wait()
        pieces = [workers.submit(lambda n=n: n) for n in range(3)]
        assert all(map(is_done_soon, pieces)), number
        assert [piece.result() for piece in pieces] == [0, 1, 2]
        workers.shutdown()


def test_a_shutdown_after_an_interrupted_one_waits_for_the_work() -> None:
    total = len(points_in(LINES, Workers("test").shutdown))
    for number in range(1, total + 5):
        workers, gate = Workers("test"), threading.Event()
        piece = workers.submit(partial(gate.wait, 0.2))  # it ends later than a call that waits not
        with suppress(Injected), interrupt_at(number, LINES):
            workers.shutdown()
        workers.shutdown()
        assert piece.done(), number


PROLOGUE = """
import atexit, os, sys, threading
import torch
late = int
atexit.register(lambda: late())  # behind what the package registers: the last comes first
from pp_offload._common.workers import Workers, inside_torch
from pp_offload.errors import ClosedError
torch.set_num_threads(1)
"""

INSIDE_TORCH = """
source, target = torch.ones(2**16), torch.ones(2**16)

def copy():
    while True:
        with inside_torch():
            target.copy_(source)

workers = Workers("copies", num_threads=4)
pieces = [workers.submit(copy) for _ in range(4)]
print("over")
"""
"""Each copy gives the interpreter's lock up, so one is always about to take it again."""

LATE = """
def late():
    for ask in (pieces[0].result, lambda: workers.submit(print)):
        try:
            ask()
        except ClosedError as error:
            print("the process ends" in str(error))

workers = Workers("stuck")
pieces = [workers.submit(threading.Event().wait)]
"""

FORKED = """
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
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
gate.set()
piece.result()
"""


def test_a_process_ends_whatever_its_threads_do(tmp_path: Path) -> None:
    """They are inside torch when Python ends or forks, or are asked for work at the very end."""
    programs = {"inside torch": INSIDE_TORCH, "late": LATE, "forked": FORKED}
    assert run_each(programs, tmp_path, PROLOGUE) == {
        "inside torch": ["over"],
        "late": ["True", "True"],
        "forked": ["7"],
    }
