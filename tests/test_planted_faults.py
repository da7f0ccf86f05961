"""The planted faults apply to the sources, and the tool tells a fault that is caught."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from helpers.sessions import begin_step, drawn, group, session
from planted.faults import DEVICE, FAULTS, PACKAGE, Fault

from pp_offload import RaceError

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", PACKAGE)
def test_every_fault_applies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PACKAGE[name].plant(monkeypatch)


def test_every_fault_has_tests() -> None:
    assert all((ROOT / fault.tests).exists() for fault in FAULTS.values())


def test_a_fault_that_does_not_apply_says_so() -> None:
    with pytest.raises(ValueError, match="is 0 times in _core/mover:Mover.join, expected once"):
        Fault("_core/mover:Mover.join", "no such line").source()


def test_a_fault_of_a_device_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    DEVICE["d2h ignores compute"].plant(monkeypatch)
    with pytest.raises(RaceError), session("late"):
        begin_step()
        group(drawn(4, 4).requires_grad_() * 2, lambda h: h.sin())


@pytest.mark.slow
def test_the_tool_tells_what_is_caught(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("tool", ROOT / "tools/planted/__main__.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.judge("h2d ignores d2h")
    assert "caught  tests/core/test_order.py::" in capsys.readouterr().out
