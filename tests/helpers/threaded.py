"""Programs on several threads: how they are run, and managers for them.

results = at_once([lambda: train(0), lambda: train(1)])
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from helpers.processes import HANG_S
from helpers.sessions import assert_no_hooks, session
from helpers.toy import AwayBackend
from pp_offload import CpuBackend, PipelineOffloadManager

KINDS = ["host", "copy threads", "disk", "host and disk", "staged disk"]
"""Where bytes go. The simulated backends follow one thread, so they are not among these."""


Lockstep = partial(threading.Barrier, timeout=HANG_S)
"""A barrier at which nobody waits for ever."""


def at_once(
    work: Sequence[Callable[[], Any]], barrier: threading.Barrier | None = None
) -> list[Any]:
    """What each piece of work returns, run on threads that begin together; or the first error,
    which breaks the barrier at which they meet later.
    """
    start, pool = Lockstep(len(work)), ThreadPoolExecutor(len(work))

    def run(piece: Callable[[], Any]) -> Any:
        try:
            start.wait()
            result = piece()
            assert_no_hooks()
            return result
        except BaseException:
            if barrier is not None:
                barrier.abort()
            raise

    futures = [pool.submit(run, piece) for piece in work]
    _, hanging = wait(futures, HANG_S)
    assert not hanging, f"{len(hanging)} of {len(futures)} threads hang"
    pool.shutdown()
    errors = [error for future in futures if (error := future.exception()) is not None]
    own = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    for error in own or errors:
        raise error
    return [future.result() for future in futures]


def manager_of(kind: str, directory: Path) -> AbstractContextManager[PipelineOffloadManager]:
    """A manager for tensors of any size."""
    backends = {"copy threads": CpuBackend(inline_bytes=0), "staged disk": AwayBackend()}
    options: dict[str, Any] = {}
    if "disk" in kind:
        options = {"tiers": ("disk",), "disk_dir": directory}
    if kind == "host and disk":
        options |= {"tiers": ("host", "disk"), "host_budget_bytes": 2**16}
    return session(backends.get(kind, CpuBackend()), **options)


def settled(owner: Any) -> None:
    """Wait until what is under way to the host or the disk is there: a few kilobytes."""
    deadline = time.monotonic() + HANG_S
    while owner.statistics().bytes_in_flight > 0:
        assert time.monotonic() < deadline, "copies are under way for ever"
        time.sleep(0.001)  # a disk has no event that tells of the last piece of work
