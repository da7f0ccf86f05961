"""The example of streamed layers: the same bits, and fewer parameters on the device."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.examples import EXAMPLES, run_command

pytest.importorskip("transformers")
pytest.importorskip("peft")

SMALL = "--steps 3 --layers 4 --width 32 --context 16 --batch 2".split()


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module: a process of its own imports for some seconds."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("stream_layers")


def run(example: ModuleType, *flags: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["stream_layers.py", *SMALL, *flags])
        code: int = example.main()
    return code


def check(figures: dict[str, Any], *, is_frozen: bool, resident: int) -> None:
    whole, streamed = figures["on the device"], figures["on the host"]
    assert streamed["losses"] == whole["losses"]
    assert whole["losses"][-1] < whole["losses"][0]
    assert streamed["layer_bytes"] == whole["layer_bytes"] * resident // 4
    assert whole["brought_bytes"] == whole["sent_bytes"] == 0 < streamed["brought_bytes"]
    assert streamed["sent_bytes"] == (0 if is_frozen else whole["layer_bytes"])


@pytest.mark.parametrize("resident", [1, 2])
@pytest.mark.parametrize("more", [[], ["--activation-checkpointing"]], ids=["kept", "again"])
@pytest.mark.parametrize("weights", [[], ["--full"]], ids=["lora", "full"])
def test_the_same_bits_with_fewer_parameters(
    example: ModuleType,
    weights: list[str],
    more: list[str],
    resident: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "figures.json"
    flags = [*weights, *more, "--resident", str(resident), "--json", str(out)]
    assert run(example, *flags) == 0
    assert "equal bit for bit" in capsys.readouterr().out
    check(json.loads(out.read_text()), is_frozen=not weights, resident=resident)


@pytest.mark.slow
def test_it_runs_as_a_script(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    script = str(EXAMPLES / "stream_layers.py")
    done = run_command([sys.executable, script, *SMALL, "--json", str(out)])
    assert done.returncode == 0, done.stdout + done.stderr
    check(json.loads(out.read_text()), is_frozen=True, resident=2)
