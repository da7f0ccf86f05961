"""Processes that tests start. No verdict depends on how fast the machine is, or what else it does.

A process that hangs says nothing, however long one waits; one that is slow says something at last.
So the limit is far beyond any machine seen, starts anew with every sign of life, and what runs into
it is asked for the stacks of its threads before it is ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

HANG_S = 1800
"""Without a sign of life for so long it hangs: on a quiet machine the whole suite takes 720 s, and
on the busiest one seen, five times as long; no part of it a tenth of that."""

Run = subprocess.CompletedProcess[str]


def start(
    command: Sequence[str], env: Mapping[str, str], out: Path, err: Path, cwd: Path | None = None
) -> subprocess.Popen:
    """A process that writes to files, and its stacks when it is told to abort."""
    with out.open("w") as stdout, err.open("w") as stderr:
        return subprocess.Popen(
            list(command),
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            env={**env, "PYTHONFAULTHANDLER": "1"},
            start_new_session=True,  # its own processes end with it
        )


def watch(processes: Sequence[subprocess.Popen], files: Sequence[Path]) -> bool:
    """Wait until all have ended well, or one has failed: the others might wait for it for ever.

    Args:
        processes: Those of :func:`start`.
        files: What they write. As long as one of these grows, none hangs.

    Returns:
        Whether none hung.
    """
    written, since = -1, time.monotonic()
    try:
        while any(each.poll() is None for each in processes) and not any(map(_failed, processes)):
            now = sum(file.stat().st_size for file in files)
            if now != written:
                written, since = now, time.monotonic()
            if time.monotonic() - since > HANG_S:
                return False
            time.sleep(0.02)
        return True
    finally:
        for process in processes:
            end(process)


def end(process: subprocess.Popen) -> None:
    """End a process that still runs, and those it started, with their stacks for the record."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGABRT)
        process.wait()
    with suppress(ProcessLookupError):  # none of those it started is left
        os.killpg(process.pid, signal.SIGKILL)


def run(
    command: Sequence[str],
    folder: Path,
    env: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
) -> Run:
    """Run a command to its end.

    Args:
        command: What to run.
        folder: An empty one, for what it writes.
        env: Its environment.
        cwd: Where it runs; here when None.
    """
    out, err = folder / "stdout", folder / "stderr"
    process = start(command, env, out, err, cwd)
    is_well = watch([process], [out, err])
    assert is_well, f"{command} hangs:\n{out.read_text()}\n{err.read_text()}"
    return subprocess.CompletedProcess(
        command, process.returncode, out.read_text(), err.read_text()
    )


def _failed(process: subprocess.Popen) -> bool:
    return bool(process.poll())
