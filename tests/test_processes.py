"""A process that is slow is waited for; one that hangs is ended, and says where."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from helpers import processes
from helpers.processes import run, start, watch

HANGS = "import threading; threading.Event().wait()"


def test_a_command_that_ends_is_given_back(tmp_path: Path) -> None:
    done = run([sys.executable, "-c", "import sys; print('a'); sys.exit('b')"], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (1, "a\n", "b\n")


def test_a_command_that_hangs_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "HANG_S", 1)
    with pytest.raises(AssertionError, match=r"(?s)hangs.*threading.py.*in wait"):
        run([sys.executable, "-c", f"print('here', flush=True)\n{HANGS}"], tmp_path)


def test_one_that_shows_signs_of_life_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes."""
    clock = iter(range(10**6))
    monkeypatch.setattr(processes, "HANG_S", 3)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(time, "sleep", lambda seconds: file.grow())

    class Growing:
        size = 0

        def grow(self) -> None:
            self.size += 1
            process.left -= 1

        def stat(self) -> os.stat_result:
            return os.stat_result((0,) * 6 + (self.size,) + (0,) * 3)

    class Lasting:
        left, pid, returncode = 100, 0, 0

        def poll(self) -> int | None:
            return None if self.left > 0 else 0

    file, process = Growing(), Lasting()
    monkeypatch.setattr(processes, "end", lambda process: None)
    assert watch([process], [file])  # type: ignore[list-item]
    process.left, file.grow = 100, lambda: None  # type: ignore[method-assign]
    assert not watch([process], [file])  # type: ignore[list-item]


def test_when_one_fails_the_others_are_not_waited_for(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a", "b")]
    ranks = [
        start([sys.executable, "-c", code], os.environ, file, file.with_suffix(".err"))
        for code, file in zip((HANGS, "raise ValueError('told')"), files, strict=True)
    ]
    assert watch(ranks, files), "it did not hang, for it is known why it would not end"
    assert all(rank.returncode for rank in ranks)
    assert "told" in files[1].with_suffix(".err").read_text()
