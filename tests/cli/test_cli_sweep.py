"""``pp-offload sweep``: limits against steps, as a table, a picture and numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runs import run

from pp_offload.plan import OffloadPlan

SMALL = "--ranks 2 --microbatches 6 --length 1024 --min-numel 1 --gib 0.01".split()


def test_a_row_for_each_limit_and_the_ends(tmp_path: Path) -> None:
    path = tmp_path / "front.png"
    code, output = run("sweep", "cli_models:deep", *SMALL, "--limits", "3", "--png", str(path))
    assert code == 0, output
    assert "cli_models:deep on 2 virtual H100, 1f1b" in output
    assert "plan 0" in output and "plan 2" in output and "plan 3" not in output
    assert "without offload - " in output and "all recomputed" not in output
    assert f"the picture is in {path}" in output
    assert path.read_bytes().startswith(b"\x89PNG")


def test_numbers_that_plans_can_be_made_of() -> None:
    code, output = run("sweep", "cli_models:deep", *SMALL, "--limits", "4", "--json")
    assert code == 0, output
    found = json.loads(output)
    plans = [OffloadPlan.from_dict(plan) for plan in found["plans"]]
    assert [plan.limit_bytes for plan in plans] == sorted(plan.limit_bytes for plan in plans)
    assert plans[-1].limit_bytes == max(found["without offload"]["peak_bytes"])
    assert plans[-1].seconds == found["without offload"]["seconds"]
    assert found["all recomputed"] is None, "the model does not say which layers may be"


def test_a_model_that_offload_does_not_make_smaller() -> None:
    """The first step, in which all leaves, needs more than one in which nothing does."""
    code, output = run("sweep", "cli_models:good", *SMALL, "--json")
    assert code == 0, output
    (plan,) = json.loads(output)["plans"]
    assert plan["seconds"] == plan["least_seconds"]


GOOD = "sweep cli_models:good --ranks 2"
WRONG = {
    "sweep": "found neither of module:function and --hf, expected one of the two",
    f"{GOOD} --limits 1": "Invalid value for '--limits'",
    f"{GOOD} --gib inf": "found inf, expected a finite number",
    f"{GOOD} --png front.txt": "--png: front.txt ends otherwise than pictures do",
    f"{GOOD} --png /nowhere/front.png": "expected a file in a directory that is there",
    "sweep cli_models:twice --ranks 2 --schedule zbv": "or stage saved as well",
}


@pytest.mark.parametrize("command", WRONG)
def test_what_cannot_be_right(command: str) -> None:
    code, output = run(*command.split())
    assert code == 2
    plain = output.replace("│", " ")
    assert WRONG[command] in " ".join(plain.split()), output
