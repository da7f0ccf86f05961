"""The lock is held for bookkeeping: whoever waits for a copy or a thread does not hold it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import make_backend
from helpers.toy import AwayBackend, assert_idle, batches, make_model, run_step, same_bits

from pp_offload import OffloadConfig, PipelineOffloadManager, use_backend
from pp_offload._common.workers import Piece, Workers, is_worker
from pp_offload.backends import Backend
from pp_offload.testing.streams import SimulatedEvent

BACKENDS: dict[str, Callable[[], Backend]] = {
    "away": AwayBackend,
    "late": lambda: make_backend("late"),
}


WIDTH = 32


class LateWorkers(Workers):
    """Threads that never come to work by themselves."""

    queued: deque[Piece]

    def queue(self, piece: Piece) -> None:
        self.queued.append(piece)


def run_and_wait(piece: Piece) -> None:
    """Do what late workers have queued up to a piece that is waited for."""
    while piece in LateWorkers.queued:
        LateWorkers.queued.popleft().run()
    wait_for_piece(piece)


wait_for_piece = Piece.wait


def steps_are_equal() -> bool:
    """Steps of changing length, against the same without offload."""
    on, off = make_model(width=WIDTH), make_model(width=WIDTH, groups=())
    for step in range(3):
        inputs = batches(4, WIDTH, step, length=9 + step)
        got = run_step(on, inputs, in_flight=3)
        if not same_bits(got, run_step(off, inputs, in_flight=3, offload=False)):
            return False
    return True


def is_free(lock: threading.RLock) -> bool:
    """Whether another thread could have it."""
    answers: list[bool] = []

    def ask() -> None:
        answers.append(lock.acquire(blocking=False))
        if answers[0]:
            lock.release()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return answers[0]


@contextmanager
def waits_seen(
    manager: PipelineOffloadManager, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[bool]]:
    """For each time that this program blocks, whether the lock was free."""
    lock, seen = manager.offloader.lock, []

    def watched(wait: Callable[[Any], Any], has_ended: Callable[[Any], bool]) -> Any:
        def look_and_wait(self: Any) -> Any:
            if not is_worker() and not has_ended(self):
                seen.append(is_free(lock))
            return wait(self)

        return look_and_wait

    with monkeypatch.context() as patch:
        patch.setattr(Piece, "wait", watched(run_and_wait, Piece.done))
        synchronize = watched(SimulatedEvent.synchronize, SimulatedEvent.is_reached)
        patch.setattr(SimulatedEvent, "synchronize", synchronize)
        yield seen


@pytest.mark.parametrize("kind", ["away", "late"])
def test_nobody_waits_with_the_lock_held(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk works only when it is waited for, so there is a wait wherever there can be one."""
    config = OffloadConfig(
        min_offloaded_tensor_size=1, tiers=("disk",), disk_dir=tmp_path, max_in_flight_bytes=3000
    )
    LateWorkers.queued = deque()
    monkeypatch.setattr("pp_offload._memory.disk_file.Workers", LateWorkers)
    with use_backend(BACKENDS[kind](), config=config) as manager:
        with waits_seen(manager, monkeypatch) as seen:
            assert steps_are_equal()
            manager.reset()
        assert len(seen) > 30
        assert all(seen)
        assert_idle(manager)
