"""The example of the Trainer: offload changes no bit, and less is held on the device."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.examples import EXAMPLES, run_example, run_here

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


def test_without_offload_there_is_one_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = figures_of(tmp_path / "figures.json", "--no-offload")
    assert set(figures) == {"without"}
    output = capsys.readouterr().out
    assert "without offload" in output
    assert "with offload" not in output and "equal" not in output


def test_a_changed_bit_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("finetune_lora")

    def train(options: Any, *, offload: bool) -> Any:
        return example.Run(losses=[2.0, 1.0 + offload])

    monkeypatch.setattr(example, "train", train)
    assert run_here(SCRIPT) == 1
    assert "DIFFERENT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [("--width 12", "not a multiple of 8"), ("--steps 0", "at least 1")],
)
def test_wrong_flags_are_explained(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_here(SCRIPT, *flags.split())
    assert message in capsys.readouterr().err
