"""The example of streamed layers: the same bits, and fewer parameters on the device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.examples import run_example, run_here

pytest.importorskip("transformers")
pytest.importorskip("peft")

SCRIPT = "stream_layers.py"
SMALL = "--steps 3 --layers 4 --width 32 --context 16 --batch 2".split()


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
    weights: list[str],
    more: list[str],
    resident: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "figures.json"
    flags = [*SMALL, *weights, *more, "--resident", resident, "--json", out]
    assert run_here(SCRIPT, *flags) == 0
    assert "equal bit for bit" in capsys.readouterr().out
    check(json.loads(out.read_text()), is_frozen=not weights, resident=resident)


@pytest.mark.slow
def test_it_runs_as_a_script(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    run_example(SCRIPT, *SMALL, "--json", out)
    check(json.loads(out.read_text()), is_frozen=True, resident=2)
