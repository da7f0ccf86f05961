"""How the emulated device is loaded; where a wait is left out it gives other bytes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers.processes import run

from emulated.helpers import compute, late, some

pytestmark = pytest.mark.emulated

N = 4096
with_and_without = pytest.mark.parametrize("waits", [False, True])


@with_and_without
def test_a_copy_to_the_host_waits_for_compute(emulated: ModuleType, waits: bool) -> None:
    given, d2h = some(N), torch.Stream(device="emulated")
    x, host = given.to("emulated"), torch.zeros(N, pin_memory=True)
    with late(emulated, compute(), d2h):
        y = x * 2
        if waits:
            d2h.wait_event(compute().record_event())
        with d2h:
            host.copy_(y, non_blocking=True)
    assert host.equal(given * 2) is waits


@with_and_without
def test_compute_waits_for_a_reload(emulated: ModuleType, waits: bool) -> None:
    given, h2d = some(N), torch.Stream(device="emulated")
    host, target = given.pin_memory(), torch.zeros(N, device="emulated")
    with late(emulated, h2d, compute()):
        with h2d:
            target.copy_(host, non_blocking=True)
        if waits:
            compute().wait_event(h2d.record_event())
        result = target * 2
    assert result.cpu().equal(given * 2) is waits


@pytest.mark.parametrize("keeps", ["nothing", "a wait", "record_stream"])
def test_freed_memory_is_used_again_in_the_order_of_its_stream(
    emulated: ModuleType, keeps: str
) -> None:
    given, side = some(N), torch.Stream(device="emulated")
    x, result = given.to("emulated"), torch.zeros(N, device="emulated")
    with late(emulated, side, compute()):
        with side:
            torch.add(x, 0, out=result)
        if keeps == "a wait":
            compute().wait_event(side.record_event())
        if keeps == "record_stream":
            x.record_stream(side)
        del x
        torch.zeros(N, device="emulated")
    assert result.cpu().equal(given) is (keeps != "nothing")


def test_it_is_loaded_before_the_first_backward(tmp_path: Path) -> None:
    """At which autograd starts its threads of devices, once in a process."""
    code = (
        "import emulated, torch; torch.ones(1, requires_grad=True).sum().backward(); "
        "emulated.load()"
    )
    done = run([sys.executable, "-c", code], tmp_path, cwd=Path(__file__).parents[1])
    assert done.returncode == 1
    assert "load it first, or in a process of its own" in done.stderr, done.stderr
