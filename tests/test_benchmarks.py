"""The benchmarks run and write every figure they promise. Their figures are not judged here."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from processes import run

ROOT = Path(__file__).parent.parent


def run_quick(name: str, tmp_path: Path) -> dict[str, Any]:
    """The figures of a short run."""
    out = tmp_path / "figures.json"
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = run(
        [sys.executable, str(ROOT / "benchmarks" / name), "--quick", "--json", str(out)],
        tmp_path,
        {**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    return json.loads(out.read_text())


def test_hook_overhead_writes_its_figures(tmp_path: Path) -> None:
    figures = run_quick("hook_overhead.py", tmp_path)
    assert set(figures["ratio_to_floor"]) == {"4", "10", "100"}
    for key in ("passthrough_ratio", "slope", "group_ratio"):
        assert isinstance(figures[key], float)


def test_step_time_writes_its_figures(tmp_path: Path) -> None:
    figures = run_quick("step_time.py", tmp_path)
    assert {"none", "ours", "save_on_cpu", "checkpoint"} <= set(figures["variants"])
    assert figures["ceiling_d2h_bytes_per_s"] > 0
    assert figures["ceiling_h2d_bytes_per_s"] > 0
    ours = figures["variants"]["ours"]
    assert ours["step_ms"] > 0
    assert ours["offloaded_bytes"] > 0


def test_host_memory_writes_its_figures(tmp_path: Path) -> None:
    figures = run_quick("host_memory.py", tmp_path)
    assert figures["footprint_ratio"] >= 1
    assert figures["footprint_ratio_powers_of_two"] > 1
    assert isinstance(figures["allocations_after_first_step"], int)
    assert figures["free_slope"] > 0


def test_disk_tier_writes_its_figures(tmp_path: Path) -> None:
    figures = run_quick("disk_tier.py", tmp_path)
    assert figures["throughput_ratio"] > 0
    assert figures["cached_ratio"] > 0
    assert figures["checksum_mib_per_s"] > 0


def test_activations_writes_its_figures(tmp_path: Path) -> None:
    figures = run_quick("activations.py", tmp_path)
    assert figures["ratio_to_floor"] > 0
    for key in ("step_ratio", "held_bytes"):
        assert {"none", "ours", "ours, checkpoints", "checkpoints", "save_on_cpu"} <= set(
            figures[key]
        )
    assert figures["held_bytes"]["ours, checkpoints"] < figures["held_bytes"]["none"]
