"""The example of a plan: a table that says what each rank does, and a file to follow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.examples import outcomes, run_example

from pp_offload.plan import OffloadPlan

SCRIPT = "plan_llama.py"
QUICK = ["--quick", "--microbatches", "6"]


def test_a_row_for_each_rank(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    done = run_example(SCRIPT, *QUICK, "--limit-gib", 0.04, "-o", path)
    plan = OffloadPlan.load(path)
    assert plan.limit_bytes == int(0.04 * 2**30)
    assert all(rank.peak_bytes <= plan.limit_bytes for rank in plan.ranks)
    rows = [line.split() for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert [row[2] for row in rows] == [f"{rank.peak_bytes / 2**30:.2f}" for rank in plan.ranks]


def test_a_limit_that_cannot_be_met() -> None:
    line = " ".join([*QUICK, "--limit-gib 0.001"])
    ((code, errors),) = outcomes(SCRIPT, [line]).values()
    message = "--limit-gib: limit_bytes is 1073741 (1.02 MiB), expected at"
    assert code != 0 and message in f"{code}{errors}"


@pytest.mark.slow
def test_a_training_by_a_plan_of_its_own(tmp_path: Path) -> None:
    """Under the limit, bit for bit equal, and each rank sends what was planned, to the byte."""
    flags = "--steps 2 --microbatches 6 --plan auto --device-budget-mib 18 --json".split()
    out = tmp_path / "figures.json"
    done = run_example("train_gpt.py", *flags, out)
    assert "equal bit for bit" in done.stdout
    figures = json.loads(out.read_text())
    both = zip(figures["device_bytes_peak_on"], figures["parameter_bytes_on"], strict=True)
    assert max(map(sum, both)) <= 18 * 2**20
    assert figures["offloaded_bytes_on"][0] > figures["offloaded_bytes_on"][1]
    rows = done.stdout.partition("at most 18 MiB by the plan")[2].splitlines()[4:]
    sent = [row.split()[3:] for row in rows if row]
    assert len(sent) == 2 and all(planned == measured for planned, measured in sent)
