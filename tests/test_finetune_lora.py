"""The example of the Trainer: offload changes no bit, and less is held on the device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.examples import run_example, run_here

pytest.importorskip("transformers")
pytest.importorskip("peft")

SCRIPT = "finetune_lora.py"
SMALL = "--steps 3 --layers 2 --width 32 --context 64".split()


def figures_of(out: Path, *flags: str) -> dict[str, Any]:
    assert run_here(SCRIPT, *SMALL, *flags, "--json", out) == 0
    return json.loads(out.read_text())


def check(figures: dict[str, Any], output: str) -> None:
    without, offload = figures["without"], figures["with"]
    assert "equal bit for bit" in output
    assert offload["losses"] == without["losses"]
    assert offload["losses"][-1] < offload["losses"][0]
    assert 0 < offload["held_bytes"] < without["held_bytes"]
    assert offload["offloaded_bytes"] > 0 < offload["host_peak_bytes"]
    assert without["offloaded_bytes"] == 0


@pytest.mark.parametrize("flags", ["--full", "--activation-checkpointing"])
def test_offload_changes_memory_and_no_bit(
    flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = figures_of(tmp_path / "figures.json", flags)
    check(figures, capsys.readouterr().out)


@pytest.mark.slow
def test_it_runs_as_a_script(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    done = run_example(SCRIPT, *SMALL, "--json", out)
    check(json.loads(out.read_text()), done.stdout)
