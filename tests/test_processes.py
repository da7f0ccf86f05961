"""A process that is slow is waited for; one that hangs is ended, and says where."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from helpers import processes
from helpers.processes import run, start, watch

HANGS = "import threading; threading.Event().wait()"


def test_a_command_that_hangs_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "HANG_S", 1)
    with pytest.raises(AssertionError, match=r"(?s)hangs.*threading.py.*in wait"):
        run([sys.executable, "-c", f"print('here', flush=True)\n{HANGS}"], tmp_path)


def test_when_one_fails_the_others_are_not_waited_for(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a", "b")]
    ranks = [
        start([sys.executable, "-c", code], os.environ, file, file.with_suffix(".err"))
        for code, file in zip((HANGS, "raise ValueError('told')"), files, strict=True)
    ]
    assert watch(ranks, files), "it did not hang, for it is known why it would not end"
    assert all(rank.returncode for rank in ranks)
    assert "told" in files[1].with_suffix(".err").read_text()
