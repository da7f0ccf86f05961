"""The CPU's copy streams, where several engines share them."""

from __future__ import annotations

import threading

import pytest

from pp_offload.backends.cpu import CopyStream

WAITS_S = 0.3
"""So long the other thread may take to come in between; where it is kept out, all of it passes."""


def test_an_event_is_behind_what_its_thread_has_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another engine, with a lock of its own, queues work at the same time."""
    stream, may_run, others_ran = CopyStream("d2h"), threading.Event(), threading.Event()
    done: list[str] = []

    def submit_other() -> None:
        stream.submit(others_ran.set)
        others_ran.wait(WAITS_S)

    def mine() -> None:
        may_run.wait()
        done.append("mine")

    other = threading.Thread(target=submit_other)
    queue = stream._workers.queue

    def queue_late(piece: object) -> None:
        if threading.current_thread() is not other:
            other.start()
            other.join(WAITS_S)
        queue(piece)

    monkeypatch.setattr(stream._workers, "queue", queue_late)
    stream.submit(mine)
    event = stream.record_event()
    assert not event.query() and not done
    may_run.set()
    event.synchronize()
    assert done == ["mine"]
    other.join()
    stream.record_event().synchronize()
    assert others_ran.is_set()
