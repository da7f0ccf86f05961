"""The benchmarks run and write every figure they promise. Their figures are not judged here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.examples import ROOT, run_example, run_here

slow = pytest.mark.slow


def run_quick(name: str, tmp_path: Path, *flags: str) -> dict[str, Any]:
    """The figures of a short run."""
    out = tmp_path / "figures.json"
    assert not run_here(ROOT / "benchmarks" / name, "--quick", "--json", str(out), *flags)
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    ("name", "positive"),
    [
        pytest.param("hook_overhead.py", "ratio_to_floor ratio_to_floor_lagging", marks=slow),
        pytest.param("host_memory.py", "footprint_ratio", marks=slow),
        pytest.param("steps.py", "reset_ms_per_10000_groups", marks=slow),
        ("disk_tier.py", "throughput_ratio cached_ratio checksum_mib_per_s"),
    ],
)
def test_a_benchmark_writes_its_figures(name: str, positive: str, tmp_path: Path) -> None:
    figures = run_quick(name, tmp_path)
    assert all(figures[key] for key in positive.split())


@slow
def test_frontier_writes_its_figures(tmp_path: Path) -> None:
    """All groups stay where there is room; recompute and ``save_on_cpu`` take longer."""
    rows = {row["way"]: row for row in run_quick("frontier.py", tmp_path, "gpt4096")["gpt4096"]}
    none, all_stay = rows["none"], rows["limit 1"]
    recompute, on_cpu = rows["recompute 2"], rows["save_on_cpu 2"]
    assert none["ratio"] == 1 <= all_stay["ratio"] < recompute["ratio"] < on_cpu["ratio"]
    assert recompute["peak_gib"] < all_stay["peak_gib"] <= none["peak_gib"]
    assert all_stay["copied_gib"] == 0 < all_stay["again_gib"]
    if "megatron 2" in rows:
        assert rows["waiting 2"]["peak_gib"] < none["peak_gib"] < rows["megatron 2"]["peak_gib"]
        assert rows["waiting 2"]["step_ms"] > rows["megatron 2"]["step_ms"] > none["step_ms"]


@slow
def test_what_a_gpu_is_asked_is_asked_of_a_cpu(tmp_path: Path) -> None:
    """All but the tests that need one."""
    flags = ["--out", str(tmp_path), "--device", "cpu", "--cases", "tiny"]
    run_example(ROOT / "tools/on_gpu.py", *flags, "--parts", "doctor", "tiny", "peers")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    ways = [row["way"] for row in rows if "way" in row]
    assert {"default", "limit-0.7", "ours-copied", "recompute", "save_on_cpu"} <= set(ways)
    assert all(row["same"] and row["ms"] > 0 for row in rows if "same" in row)
    outcomes = json.loads((tmp_path / "outcomes.json").read_text())
    assert all(outcome.startswith("ended") for outcome in outcomes.values())


@slow
def test_rematerialize_writes_its_figures(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    figures = run_quick("rematerialize.py", tmp_path)
    for row in figures["models"]:
        assert row["none_equal"] and row["cheap_equal"]
        assert 0 < row["cheap_bytes"] < row["none_bytes"] and row["again_bytes"] > 0
    ours = [row for row in figures["virtual"] if row["way"] == "ours, cheap"]
    assert len(ours) == 1 and all(row["bytes"] < 0.7 and row["compute"] > 1 for row in ours)


def test_a_virtual_h100_is_as_the_real_one_was(tmp_path: Path) -> None:
    """A step of GPT without offload, and where its layers are recomputed."""
    rows = run_quick("h100.py", tmp_path)
    assert [row["way"] for row in rows] == ["none", "recompute"]
    for row in rows:
        assert row["here_peak_gib"] == pytest.approx(row["peak_gib"], rel=1e-3)
        assert row["here_ratio"] == pytest.approx(row["ratio"], rel=0.03)
