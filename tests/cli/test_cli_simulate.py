"""``pp-offload simulate``: a row for each rank, the limit of a plan, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.cli import check_refused, good, run

from pp_offload._common.offload_plan import OffloadPlan
from pp_offload.trace import read

SIZES = "--ranks 2 --microbatches 4 --length 256 --min-numel 1".split()
SMALL = ("simulate", "helpers.cli_models:good", *SIZES)
DEEP = ("helpers.cli_models:deep", *SIZES, "--length", "1024")


def test_a_row_for_each_rank(tmp_path: Path) -> None:
    trace = tmp_path / "out.json.gz"
    output = good(*SMALL, "--trace", trace, "--pp", 3, "--device", "H200")
    assert "cli_models:good on 3 virtual H200, 1f1b, 1 stage each, 4 microbatches of 256" in output
    assert "linear and gelu may leave" in output
    figures = json.loads(good(*SMALL, "--json", "--groups", "linear"))
    none, ours = figures["without offload"]["ranks"], figures["with offload"]["ranks"]
    assert all(rank["bytes_offloaded"] == 0 for rank in none)
    assert ours[0]["bytes_offloaded"] > 0 == ours[1]["bytes_offloaded"], "the last group stays"
    rows = [line.split()[0] for line in output.splitlines() if line[:1].isdigit()]
    assert rows == ["0", "1", "2"]
    assert read(trace).ranks == [0, 1, 2]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    good("plan", *DEEP, "--limit", "300MiB", "-o", path)
    return path


def test_a_plan_and_its_limit(plan: Path, tmp_path: Path) -> None:
    """The exit code is 1 where a rank is above it."""
    output = good("simulate", *DEEP, "--plan", plan)
    assert output.endswith("The plan's limit is 0.29 GiB, and no rank is above it.\n")
    whole = OffloadPlan.load(plan)
    peak = max(rank.peak_bytes for rank in whole.ranks)
    whole.with_limit(peak - 2**20).save(tmp_path / "lower.json")
    code, output = run("simulate", *DEEP, "--plan", tmp_path / "lower.json")
    assert code == 1 and output.endswith("GiB; above it is rank 0 by 1.00 MiB.\n"), output


def test_a_plan_of_another_pipeline(plan: Path) -> None:
    code, output = run("simulate", *DEEP, "--plan", plan, "--ranks", 3)
    assert code == 2 and "the plan is for 2 pipeline ranks, and this is rank 2" in output
    code, output = run("simulate", *DEEP, "--plan", plan, "--fraction", 0.5)
    assert code == 2 and "expected one way to say what stays" in output


GOOD = "simulate helpers.cli_models:good --ranks 2"
WRONG = {
    "simulate": "found neither of module:function and --hf, expected one of the two",
    "simulate helpers.cli_models:good --hf x": "found both of module:function and --hf",
    "simulate cli_models": "Invalid value for MODEL: found 'cli_models', expected module:function",
    "simulate no_file:stages": "no module 'no_file' here or installed",
    "simulate helpers.cli_models:nothing": "nothing of helpers.cli_models is not there, expected a",
    "simulate helpers.cli_models:without_length": "unexpected keyword argument 'length'",
    "simulate helpers.cli_models:a_list": "returned a list, expected a function that takes num_st",
    "simulate helpers.cli_models:too_few": "returned 3 stages, expected num_stages: 4",
    "simulate helpers.cli_models:on_the_cpu": "weight of stages[0] is on cpu, expected meta",
    "simulate helpers.cli_models:unmarked --groups mlp": "found 'mlp', but the model marks",
    f"{GOOD} --groups moe": "found 'moe', expected some of linear,gelu with commas",
    f"{GOOD} --device H10": "found 'H10' (did you mean H100?), expected one of A100, H100",
    f"{GOOD} --schedule 1F1B": "(did you mean 1f1b?)",
    f"{GOOD} --virtual-stages 2": "1f1b takes --virtual-stages 1; try interleaved1f1b",
    f"{GOOD} --microbatches 1": "--schedule: Schedule1F1B is no schedule of 2 stages",
    f"{GOOD} --trace no_such_folder/out.json": "expected a file in a directory that is there",
    f"{GOOD} --plan nowhere.json": "No such file or directory",
    f"{GOOD} --optimizer adamw": "found 'adamw' (did you mean AdamW?)",
    f"{GOOD} --optimizer Adafactor": "--optimizer: the optimizer is Adafactor, expected one that",
}


@pytest.mark.parametrize("command", WRONG)
def test_what_cannot_be_right_is_refused(command: str) -> None:
    check_refused(command, WRONG[command])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{}", "'hardware'"),
        ('{"hardware": {"nam": "x"}}', "Hardware has unknown options 'nam' (did you mean name?)"),
        ("no JSON", "Expecting value"),
    ],
)
def test_a_file_that_is_no_hardware_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "out.json").write_text(text)
    command = f"{GOOD} --hardware {tmp_path / 'out.json'}"
    check_refused(command, "is no file of pp-offload doctor --measure")
    check_refused(command, problem)


def test_errors_of_the_user_keep_their_traceback() -> None:
    with pytest.raises(ValueError, match="what went wrong in my model"):
        run("simulate", "helpers.cli_models:broken")
    with pytest.raises(ValueError, match="what went wrong in my optimizer"):
        run(*SMALL, "--optimizer", "helpers.cli_models:broken_optimizer")
