"""How the emulated accelerator is loaded; what runs on it is in tests/emulated and everywhere.

In a process of its own, because a device cannot be unloaded: with it there, ``default_backend()``
is another one, and ``pin_memory=True`` means something, for every test that follows. And because
autograd starts its device threads once, at the first backward.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers.processes import run

TESTS = Path(__file__).parent


@pytest.mark.emulated
def test_it_is_loaded_before_the_first_backward(tmp_path: Path) -> None:
    code = (
        "import emulated, torch; torch.ones(1, requires_grad=True).sum().backward(); "
        "emulated.load()"
    )
    done = run([sys.executable, "-c", code], tmp_path, cwd=TESTS)
    assert done.returncode == 1
    assert "load it first, or in a process of its own" in done.stderr, done.stderr
