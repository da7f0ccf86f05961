"""The example of parameters on the host trains in three ways: the same bits, less memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.examples import run_example

SMALL = "--steps 3 --layers 6 --width 32 --context 16 --batch 4 --slices 4".split()


@pytest.mark.quick(2)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_three_ways_to_train(microbatches: int, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    flags = [*SMALL, "--microbatches", microbatches, "--json", out]
    done = run_example("offload_model.py", *flags)
    assert "all losses and final parameters: equal bit for bit" in done.stdout
    result = json.loads(out.read_text())
    assert result.pop("bitwise_equal") is True
    assert list(result) == ["on the device", "in slices", "run again"]
    whole, sliced, again = result.values()
    assert all(f"\n{way}  " in done.stdout for way in result)
    assert whole["loss_last"] < whole["loss_first"]
    assert whole["brought_bytes"] == whole["sent_bytes"] == 0
    for run in (sliced, again):
        assert (run["loss_first"], run["loss_last"]) == (whole["loss_first"], whole["loss_last"])
        assert run["parameter_bytes"] < 0.7 * whole["parameter_bytes"]
        assert run["sent_bytes"] == whole["parameter_bytes"]
        assert run["sent_bytes"] < run["brought_bytes"] < 2 * whole["parameter_bytes"]
