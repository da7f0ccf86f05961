"""The example, and benchmarks that are meant for a GPU, each in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_benchmarks import check_disk_step, check_in_flight_caps, run_quick
from test_example import train

pytestmark = pytest.mark.emulated


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_the_example_has_the_same_bits_on_it(tier: str, tmp_path: Path) -> None:
    figures, output = train(
        tmp_path / "figures.json", *f"--stages 1 --device emulated --steps 2 --tier {tier}".split()
    )
    assert figures["bitwise_equal"] is True and "equal bit for bit" in output
    assert min(figures["offloaded_bytes"]) > 0
    assert min(figures["disk_peak_bytes"]) > 0 or tier == "host"
    assert 0 < figures["device_bytes_peak_on"][0] < figures["device_bytes_peak_off"][0]


def test_what_is_meant_for_a_gpu_runs_on_it(tmp_path: Path) -> None:
    on_it = ("--device", "emulated")
    figures = run_quick("in_flight_caps.py", tmp_path, *on_it)
    # Backward brings all back, for the window is large; a copy that is late keeps one group more.
    most = figures["none"]["peak_bytes"] + 0.07 * 2**20
    assert 0 < figures["0.025 MiB"]["peak_bytes"] <= most
    check_in_flight_caps(figures)
    trace = tmp_path / "trace.json"
    figures = run_quick("disk_step.py", tmp_path, *on_it, "--trace", str(trace))
    assert figures["host_peak_bytes"] > 0, "bytes pass through staging memory"
    check_disk_step(figures, trace)


def test_the_virtual_device_is_held_to_it(tmp_path: Path) -> None:
    figures = run_quick("paced.py", tmp_path)
    assert figures["worst_error"] >= figures["mean_error"] >= 0
    assert len(figures["programs"]) == 2
    for one in figures["programs"]:
        assert min(one["predicted_ms"], one["measured_ms"], one["copy_ms"], one["kernel_ms"]) > 0
        assert one["counts"]["bytes_offloaded"] > 0
        for kind in ("kernel", "bytes_offloaded"):  # into how many pieces depends on the threads
            assert one["counts"][kind] == one["virtual_counts"][kind]
        assert one["bitwise_equal"]


def test_the_time_of_a_cap_is_measured_on_it(tmp_path: Path) -> None:
    figures = run_quick("cap_cliff.py", tmp_path)
    assert list(figures) == ["0", "1 group - 1 B", "1 group", "1.5 groups", "2 groups", "auto"]
    assert all(one["bitwise_equal"] and one["ratio"] > 0 for one in figures.values())
    ratios = {name: one["virtual_ratio"] for name, one in figures.items()}
    assert ratios.pop("0") > 1.5
    assert all(ratio == pytest.approx(1) for ratio in ratios.values()), "rounded sums of times"
