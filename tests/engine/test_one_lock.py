"""The lock is held for bookkeeping: whoever waits for a copy or a thread does not hold it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from helpers.nets import Net, inputs, train
from helpers.sessions import assert_idle, assert_same
from helpers.toy import AwayBackend

from pp_offload import OffloadConfig, use_backend
from pp_offload._common.workers import Piece, Workers, is_worker

QUEUED: deque[Piece] = deque()
"""What late workers have to do."""


class LateWorkers(Workers):
    """Threads that never come to work by themselves."""

    def queue(self, piece: Piece) -> None:
        QUEUED.append(piece)


@contextmanager
def waits_seen(lock: Any) -> Iterator[list[bool]]:
    """For each time that this program blocks, whether this thread did so without the lock.

    Late workers do what they have to do up to a piece that is waited for.
    """
    seen, wait = list[bool](), Piece.wait

    def look_and_wait(piece: Piece) -> None:
        if not is_worker() and not piece.done():
            seen.append(not lock._is_owned())
        while piece in QUEUED:
            QUEUED.popleft().run()
        wait(piece)

    with patch.object(Piece, "wait", look_and_wait):
        yield seen


@patch("pp_offload._memory.disk_file.Workers", LateWorkers)
def test_nobody_waits_with_the_lock_held(tmp_path: Path) -> None:
    """A disk works only when it is waited for, so there is a wait wherever there can be one."""
    config = OffloadConfig(
        min_offloaded_tensor_size=1, tiers=("disk",), disk_dir=tmp_path, max_in_flight_bytes=500
    )
    with use_backend(AwayBackend(), config=config) as manager:
        with waits_seen(manager.offloader.lock) as seen:
            for step in range(3):
                net, xs = Net(), inputs(4, step=step, rows=9 + step)
                assert_same(train(net, xs, True, ahead=3), train(net, xs, False, ahead=3))
            manager.reset()
        assert len(seen) > 30
        assert all(seen)
        assert_idle(manager)
