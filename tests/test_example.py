"""The example trains, offloads, ends with the same bits, and says so in its figures."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers.examples import outcomes, train

from pp_offload.trace import read


def check(figures: dict[str, Any], output: str) -> None:
    """What holds for every comparison of two ranks."""
    assert figures["bitwise_equal"] is True
    assert figures["loss_last_on"] < figures["loss_first_on"]
    assert figures["loss_first_on"] == figures["loss_first_off"]
    assert figures["loss_last_on"] == figures["loss_last_off"]
    assert figures["step_ms_off"] > 0 and figures["step_ms_on"] > 0
    for key in ("offloaded_bytes_on", "host_peak_bytes_on"):
        assert len(figures[key]) == 2 and min(figures[key]) > 0, key
    peaks = zip(figures["device_bytes_peak_on"], figures["device_bytes_peak_off"], strict=True)
    assert all(0 < on < off for on, off in peaks)
    assert "equal bit for bit" in output
    assert "offloaded at the peak of a step" in output


@pytest.mark.parametrize(
    ("schedule", "mark"),
    [
        ("interleaved1f1b", "markers"),
        pytest.param("1f1b", "modules", marks=pytest.mark.slow),
    ],
)
def test_offload_changes_memory_and_no_bit(schedule: str, mark: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json.gz"
    flags = f"--schedule {schedule} --mark {mark} --layers 8 --trace {out}".split()
    check(*train(tmp_path / "figures.json", *flags))
    assert {path.name for path in tmp_path.iterdir()} == {"figures.json", "out.json.gz"}
    timeline = read(out)
    assert timeline.ranks == [0, 1]
    for rank in timeline.ranks:
        assert len(timeline.of(rank, "steps")) == 2
        names = Counter(item.name for item in timeline.of(rank, "compute"))
        for group in ("attn", "mlp"):
            assert names[f"{group} (forward)"] == names[f"{group} (backward)"] == 2 * 4 * 4


@pytest.mark.slow
def test_runs_under_torchrun(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    check(*train(tmp_path / "figures.json", launcher=launcher))


WRONG = {
    "--groups moe": "unknown groups ['moe']",
    "--schedule zbv --virtual-stages 3": "zbv takes --virtual-stages 2",
    "--schedule 2f2b": "none of gpipe, 1f1b, interleaved1f1b",
    "--text no/such/file": "is not a file",
    "--disk-dir /tmp": "needs --tier disk",
    "--trace no/such/out.json": "expected a file in a directory that is there",
    "--device emulated": "needs --stages 1",
    "--mark markers --groups mlp_norm": "mark only attn and mlp",
}


def test_wrong_flags_are_explained() -> None:
    seen = outcomes("train_gpt.py", WRONG)
    assert list(seen) == list(WRONG)
    for flags, (code, errors) in seen.items():
        assert code == 2 and WRONG[flags] in errors, f"{flags}: {code}, {errors}"
