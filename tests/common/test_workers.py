"""Threads that do what is queued: in order, and whatever a signal handler raises where."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue

import pytest
from injected import Injected, files, interrupt_at, num_lines
from processes import HANG_S

from pp_offload._common import workers as module
from pp_offload._common.workers import Workers

LINES = files("_common/workers")


@pytest.fixture
def one() -> Iterator[Workers]:
    workers = Workers("test")
    yield workers
    workers.shutdown()


def is_done_soon(piece: module.Piece) -> bool:
    """Asked by another thread, which an interrupt cannot reach."""
    waiting = threading.Thread(target=piece.wait, daemon=True)
    waiting.start()
    waiting.join(HANG_S)
    return piece.done()


def test_what_is_queued_is_done_in_turn_however_many_threads_were_started(one: Workers) -> None:
    """An interrupt may come between the start of a thread and the note of it."""
    for _ in range(3):
        one._start_one()
    is_second_running = threading.Event()
    seen: list[bool] = []
    one.submit(lambda: seen.append(is_second_running.wait(0.5)))
    assert is_done_soon(one.submit(is_second_running.set))
    assert seen == [False]


def test_one_serves_where_its_start_was_cut_off(one: Workers) -> None:
    def start() -> None:
        one.submit(lambda: None).wait()

    total = num_lines(LINES, lambda: Workers("test").submit(lambda: None).wait())
    assert total > 10
    for number in range(1, total + 1):
        one._begin()
        try:
            with interrupt_at(number, LINES):
                start()
        except Injected:
            pass
        pieces = [one.submit(lambda n=n: n) for n in range(3)]
        assert all(map(is_done_soon, pieces)), number
        assert [piece.result() for piece in pieces] == [0, 1, 2]


def test_who_waits_is_interrupted_and_nobody_else_waits_for_ever(one: Workers) -> None:
    """At every line of it; the wait itself is C."""
    one.submit(lambda: None).wait()

    def wait() -> None:
        gate: SimpleQueue[None] = SimpleQueue()
        try:
            piece = one.submit(gate.get)
            threading.Thread(target=gate.put, args=(None,), daemon=True).start()
            piece.wait()
        finally:
            gate.put(None)

    total = num_lines(LINES, wait)
    assert total > 5
    for number in range(1, total + 1):
        try:
            with interrupt_at(number, LINES):
                wait()
        except Injected:
            pass
        assert is_done_soon(one.submit(lambda: None)), number


def test_a_wait_for_what_has_ended_returns(one: Workers) -> None:
    piece = one.submit(lambda: 3)
    assert piece.result() == piece.result() == 3
    assert not piece.call_off()
