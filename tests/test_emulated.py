"""What runs on the emulated accelerator, each file of it in a process of its own.

In a process of its own, because a device cannot be unloaded: with it there, ``default_backend()``
is another one, and ``pin_memory=True`` means something, for every test that follows. And because
autograd starts its device threads once, at the first backward, which here ran long ago.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import emulated
import pytest
import torch
from processes import run

pytestmark = pytest.mark.skipif(
    not os.environ.get("PP_OFFLOAD_EMULATED"),
    reason="builds a device of 1,700 lines of C++; set PP_OFFLOAD_EMULATED=1 to run it",
)

FOLDER = Path(__file__).with_name("emulated")
FILES = sorted(file.name for file in FOLDER.glob("check_*.py"))


def environment() -> dict[str, str]:
    """Without what a pytest that runs this one may have set."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}


@pytest.mark.parametrize("name", FILES)
def test_on_the_emulated_device(name: str, tmp_path: Path) -> None:
    reason = emulated.why_not()
    if reason is not None:
        pytest.skip(reason)
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider"]
    done = run([*command, str(FOLDER / name)], tmp_path, environment(), FOLDER.parent.parent)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "passed" in done.stdout and "skipped" not in done.stdout, done.stdout


def test_nothing_is_loaded_by_importing_it() -> None:
    assert torch._C._get_privateuse1_backend_name() == "privateuseone"
    assert not hasattr(torch, "emulated")


def test_without_a_compiler_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(emulated.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(emulated.EmulatedDeviceError, match="no c.. and no ninja .* install"):
        emulated.load()
    assert list(tmp_path.iterdir()) == []


def test_it_is_loaded_before_the_first_backward(tmp_path: Path) -> None:
    reason = emulated.why_not()
    if reason is not None:
        pytest.skip(reason)
    code = (
        "import emulated, torch; torch.ones(1, requires_grad=True).sum().backward(); "
        "emulated.load()"
    )
    done = run([sys.executable, "-c", code], tmp_path, environment(), FOLDER.parent)
    assert done.returncode == 1
    assert "load it first, or in a process of its own" in done.stderr, done.stderr
