"""The example of a virtual pipeline says what each rank costs, without and with offload."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.examples import outcomes, run_example

from pp_offload.trace import read

SCRIPT = "simulate_llama.py"


@pytest.mark.parametrize(
    ("schedule", "in_flight"),
    [
        ("zbv", [4, 4]),
        pytest.param("1f1b", [2, 1], marks=pytest.mark.slow),
        pytest.param("interleaved1f1b", [5, 3], marks=pytest.mark.slow),
    ],
)
def test_a_row_for_each_rank(schedule: str, in_flight: list[int], tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    flags = ["--quick", "--schedule", schedule, "--groups", "attn,mlp", "--gib", "0"]
    trace = tmp_path / "trace.json.gz"
    done = run_example(SCRIPT, *flags, "--json", out, "--trace", trace)
    assert f"Llama tiny on 2 virtual H100, {schedule}" in done.stdout
    figures = json.loads(out.read_text())
    assert list(figures) == ["without offload", "with offload"]
    none, ours = (step["ranks"] for step in figures.values())
    for number, (without, with_it) in enumerate(zip(none, ours, strict=True)):
        assert without["num_in_flight"] == with_it["num_in_flight"] == in_flight[number]
        assert without["bytes_offloaded"] == without["host_peak_bytes"] == 0
        assert with_it["bytes_offloaded"] > 0 and with_it["host_peak_bytes"] > 0
        assert with_it["peak_bytes"] < without["peak_bytes"]
    assert read(trace).ranks == [0, 1]
    rows = [line.split() for line in done.stdout.splitlines() if line[:1].isdigit()]
    for number, row in enumerate(rows):
        peak_gib = [f"{ranks[number]['peak_bytes'] / 2**30:.2f}" for ranks in (none, ours)]
        assert row[:3] == [str(number), *peak_gib]
    assert len(rows) == 2


WRONG = {
    "--groups moe": "--groups is 'moe', expected attn, mlp or attn,mlp",
    "--microbatches 0": "num_microbatches is 0, expected an integer of at least 1",
    "--ranks 40": "there are 32 layers, fewer than stages",
    "--virtual-stages 2": "1f1b takes --virtual-stages 1",
}


def test_wrong_flags_are_explained() -> None:
    for flags, (code, message) in outcomes(SCRIPT, WRONG).items():
        assert code == 2 and WRONG[flags] in message, f"{flags}: {code}, {message}"
