"""``pp-offload simulate``: whether a plan's limit is kept, and both steps have an optimizer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cli_runs import run

from pp_offload._common.offload_plan import OffloadPlan

SMALL = "cli_models:deep --ranks 2 --microbatches 4 --length 1024 --min-numel 1".split()
ADAM = ("--optimizer", "AdamW")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    code, output = run("plan", *SMALL, "--limit", "300MiB", "-o", str(path))
    assert code == 0, output
    return path


def test_the_limit_of_a_plan_is_said_to_be_kept(path: Path) -> None:
    code, output = run("simulate", *SMALL, "--plan", str(path))
    assert code == 0, output
    assert output.endswith("The plan's limit is 0.29 GiB, and no rank is above it.")
    found = json.loads(run("simulate", *SMALL, "--plan", str(path), "--json")[1])
    assert found["limit_bytes"] == 300 * 2**20
    code, output = run("simulate", *SMALL)
    assert "plan's limit" not in output
    assert "limit_bytes" not in json.loads(run("simulate", *SMALL, "--json")[1])


def test_ranks_above_the_limit_are_named(path: Path, tmp_path: Path) -> None:
    plan = OffloadPlan.load(path)
    lower = tmp_path / "lower.json"
    peak = max(rank.peak_bytes for rank in plan.ranks)
    plan.with_limit(peak - 2**20).save(lower)
    code, output = run("simulate", *SMALL, "--plan", str(lower))
    assert code == 1, output
    gib = f"{(peak - 2**20) / 2**30:.2f}"
    assert output.endswith(f"The plan's limit is {gib} GiB; above it is rank 0 by 1.0 MiB.")


def test_what_offload_makes_worse_is_said(path: Path) -> None:
    """All groups leave without a plan, on a link that is too slow for them."""
    output = run("simulate", *SMALL)[1]
    assert re.search(r"Offload costs more than it has to: a step is \d+% longer[.,]", output)
    assert "`pp-offload plan` says what is to leave for a limit" in output
    assert "costs more" not in run("simulate", *SMALL, "--fraction", "0")[1]
    assert "costs more" not in run("simulate", *SMALL, "--plan", str(path))[1]


def test_both_steps_have_the_state_of_an_optimizer() -> None:
    """Which is not there yet in a first step."""
    code, output = run("simulate", *SMALL, *ADAM, "--fraction", "0", "--json")
    assert code == 0, output
    found = json.loads(output)
    none, ours = (found[name]["ranks"] for name in ("without offload", "with offload"))
    assert [rank["peak_bytes"] for rank in none] == [rank["peak_bytes"] for rank in ours]
    seconds = [rank["seconds"] for rank in ours]
    assert [rank["seconds"] for rank in none] == pytest.approx(seconds, rel=1e-9)


def test_an_optimizer_that_the_plan_or_the_run_alone_has_is_told_of(
    path: Path, tmp_path: Path
) -> None:
    with_state = tmp_path / "plan.json"
    code, output = run("plan", *SMALL, *ADAM, "--limit", "1GiB", "-o", str(with_state))
    assert code == 0, output
    output = run("simulate", *SMALL, "--plan", str(with_state))[1]
    said = "The plan counts the state of an optimizer, and this run has none: give the --optimizer"
    assert said in output
    output = run("simulate", *SMALL, "--plan", str(with_state), "--json")[1]
    assert json.loads(output)["caution"].startswith(said)
    output = run("simulate", *SMALL, *ADAM, "--plan", str(path))[1]
    assert "This run has the state of an optimizer, which the plan does not count: plan" in output
    assert "with the same --optimizer" in output


@pytest.mark.parametrize("name", ["AdamW", "SGD", None])
def test_nothing_is_said_where_both_have_the_same_optimizer(
    name: str | None, tmp_path: Path
) -> None:
    """That of SGD has no state; neither do those that are not there."""
    same = tmp_path / "plan.json"
    how = () if name is None else ("--optimizer", name)
    code, output = run("plan", *SMALL, *how, "--limit", "1GiB", "-o", str(same))
    assert code == 0, output
    for planned_with in (how, ("--optimizer", "SGD") if name is None else how):
        output = run("simulate", *SMALL, *planned_with, "--plan", str(same), "--json")[1]
        assert "caution" not in json.loads(output)
