"""The benchmarks run and write every figure they promise. Their figures are not judged here."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import run

ROOT = Path(__file__).parent.parent


def run_quick(name: str, tmp_path: Path, *flags: str) -> dict[str, Any]:
    """The figures of a short run."""
    out = tmp_path / "figures.json"
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = run(
        [sys.executable, str(ROOT / "benchmarks" / name), "--quick", "--json", str(out), *flags],
        tmp_path,
        {**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    return json.loads(out.read_text())


@pytest.mark.slow
def test_hook_overhead_writes_its_figures(tmp_path: Path) -> None:
    figures = run_quick("hook_overhead.py", tmp_path)
    assert set(figures["ratio_to_floor"]) == {"4", "10", "100"}
    for key in ("passthrough_ratio", "slope", "group_ratio"):
        assert isinstance(figures[key], float)


def test_steps_writes_its_figures(tmp_path: Path) -> None:
    figures = run_quick("steps.py", tmp_path)
    for key in ("reset_ms_per_10000_groups", "reset_ms_changed", "drop_ms_per_10000_groups"):
        assert set(figures[key]) == {"100", "16"}
        assert all(one["median"] >= one["min"] > 0 for one in figures[key].values())
    for key in (
        "attach_us_per_1000_parameters",
        "attach_us_changed",
        "disabled_us",
        "offload_false_us",
    ):
        assert set(figures[key]) == {"min", "median"}, "a difference of times may have any sign"


def test_virtual_step_writes_its_figures(tmp_path: Path) -> None:
    figures = run_quick("virtual_step.py", tmp_path)
    none, default, *others = (one for one in figures if one["bounds"] != "megatron")
    names = [one["bounds"] for one in (none, default, *others)]
    assert names[:5] == ["none", "default", "save_on_cpu", "recompute", "inputs"]
    assert names[5] == "1/1" and len(names) > 6
    assert none["ratio_to_none"] == 1 and none["need"] == 0
    for one in (default, *others):
        assert one["peak_gib"] < none["peak_gib"] or "/" in one["bounds"]
        assert one["step_ms"] >= none["step_ms"] and one["stalled_ms"] >= 0
        assert one["need"] > 0 or one["bounds"] == "recompute"
    assert default["verdict"]
    assert default["peak_to_best"] == default["peak_gib"] / default["best_gib"]


def test_frontier_writes_its_figures(tmp_path: Path) -> None:
    """All groups stay where there is room; recompute and ``save_on_cpu`` take longer."""
    rows = {row["way"]: row for row in run_quick("frontier.py", tmp_path)["gpt4096"]}
    none, all_stay = rows["none"], rows["limit 1"]
    recompute, on_cpu = rows["recompute 2"], rows["save_on_cpu 2"]
    assert none["ratio"] == 1 <= all_stay["ratio"] < recompute["ratio"] < on_cpu["ratio"]
    assert recompute["peak_gib"] < all_stay["peak_gib"] <= none["peak_gib"]
    assert all_stay["copied_gib"] == 0 < all_stay["again_gib"]
    if "megatron 2" in rows:
        assert rows["waiting 2"]["peak_gib"] < none["peak_gib"] < rows["megatron 2"]["peak_gib"]
        assert rows["waiting 2"]["step_ms"] > rows["megatron 2"]["step_ms"] > none["step_ms"]


def test_rows_of_a_card_have_equal_bits(tmp_path: Path) -> None:
    ways = ["recompute", "ours", "activations"]
    short = ["--rounds", "1", "--warmup", "1"]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = run(
        [sys.executable, str(ROOT / "benchmarks/on_card.py"), "tiny", *short, "--ways", *ways],
        tmp_path,
        {**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    link, *rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert min(link["link_gb_per_s"]) > 0
    assert [row["way"] for row in rows] == ways
    assert all(row["same"] and row["ms"] > 0 for row in rows)


@pytest.mark.slow
def test_what_a_gpu_is_asked_is_asked_of_a_cpu(tmp_path: Path) -> None:
    """All but the tests that need one."""
    command = [sys.executable, str(ROOT / "tools/on_gpu.py"), "--out", str(tmp_path)]
    command += ["--device", "cpu", "--cases", "tiny", "--parts", "doctor", "tiny", "peers"]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = run(command, tmp_path, {**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stdout
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    ways = [row["way"] for row in rows if "way" in row]
    assert {"default", "limit-0.7", "ours-copied", "recompute", "save_on_cpu"} <= set(ways)
    assert all(row["same"] for row in rows if "same" in row)
    outcomes = json.loads((tmp_path / "outcomes.json").read_text())
    assert all(outcome.startswith("ended") for outcome in outcomes.values())


@pytest.mark.slow
def test_host_memory_writes_its_figures(tmp_path: Path) -> None:
    figures = run_quick("host_memory.py", tmp_path)
    assert figures["footprint_ratio"] >= 1
    assert figures["footprint_ratio_powers_of_two"] > 1
    assert isinstance(figures["allocations_after_first_step"], int)
    assert figures["free_slope"] > 0


def test_random_sizes_writes_its_figures(tmp_path: Path) -> None:
    figures = run_quick("random_sizes.py", tmp_path)
    assert set(figures["us_per_take"]) == {"5", "10"}
    assert figures["take_ratio"] > 0
    assert all(set(one) == {"5", "10"} for one in figures["by_case"].values())


def test_disk_tier_writes_its_figures(tmp_path: Path) -> None:
    figures = run_quick("disk_tier.py", tmp_path)
    assert figures["throughput_ratio"] > 0
    assert figures["cached_ratio"] > 0
    assert figures["checksum_mib_per_s"] > 0


@pytest.mark.slow
def test_activations_writes_its_figures(tmp_path: Path) -> None:
    figures = run_quick("activations.py", tmp_path)
    assert math.isfinite(figures["ratio_to_floor"]), "a difference of times may have any sign"
    for key in ("step_ratio", "held_bytes"):
        assert {"none", "ours", "ours, checkpoints", "checkpoints", "save_on_cpu"} <= set(
            figures[key]
        )
    assert figures["held_bytes"]["ours, checkpoints"] < figures["held_bytes"]["none"]


def check_in_flight_caps(figures: dict[str, Any]) -> None:
    assert list(figures) == ["none", "0.025 MiB", "0.05 MiB", "0.2 MiB", "default"]
    assert all(one["step_ms"] > 0 and one["bitwise_equal"] for one in figures.values())
    assert figures.pop("none")["offloaded_bytes"] == 0
    assert all(one["offloaded_bytes"] > 0 for one in figures.values())


@pytest.mark.slow
def test_in_flight_caps_writes_its_figures(tmp_path: Path) -> None:
    check_in_flight_caps(run_quick("in_flight_caps.py", tmp_path))


def check_disk_step(figures: dict[str, Any], trace: Path) -> None:
    assert figures["step_ms"] > 0 and figures["step_ms_none"] > 0
    assert 0 < figures["read_bytes"] <= figures["written_bytes"]
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"forward", "backward", "aten::mm"} <= names


@pytest.mark.slow
def test_disk_step_writes_its_figures_and_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    check_disk_step(run_quick("disk_step.py", tmp_path, "--trace", str(trace)), trace)


def test_predict_exact_writes_its_figures(tmp_path: Path) -> None:
    figures = run_quick("predict_exact.py", tmp_path)
    assert figures["num_compared"] == 7 and figures["failed"] == {}
    assert 0 < figures["num_offloading"] < 7, "or what is equal may be nothing, or all alike"
    assert figures["num_unequal"] == 0 and figures["worst_time_gap"] <= 1e-9


def test_rematerialize_writes_its_figures(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    figures = run_quick("rematerialize.py", tmp_path)
    for row in figures["models"]:
        assert row["none_equal"] and row["cheap_equal"]
        assert 0 < row["cheap_bytes"] < row["none_bytes"] and row["again_bytes"] > 0
    ours = [row for row in figures["virtual"] if row["way"] == "ours, cheap"]
    assert len(ours) == 2 and all(row["bytes"] < 0.7 and row["compute"] > 1 for row in ours)


def test_a_virtual_h100_is_as_the_real_one_was(tmp_path: Path) -> None:
    """A step of GPT without offload, and where its layers are recomputed."""
    rows = run_quick("h100.py", tmp_path)
    assert [row["way"] for row in rows] == ["none", "recompute"]
    for row in rows:
        assert row["here_peak_gib"] == pytest.approx(row["peak_gib"], rel=1e-3)
        assert row["here_ratio"] == pytest.approx(row["ratio"], rel=0.03)
