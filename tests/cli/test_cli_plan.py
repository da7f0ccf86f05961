"""``pp-offload plan``: a table first, a file to follow, and every error as a new user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runs import run

from pp_offload import OffloadConfig

SMALL = "--ranks 2 --microbatches 4 --length 256 --min-numel 1".split()


def test_a_table_and_a_file_that_the_engine_follows(tmp_path: Path) -> None:
    path, png = tmp_path / "plan.json", tmp_path / "plan.png"
    where = ["-o", str(path), "--png", str(png)]
    code, output = run("plan", "cli_models:good", *SMALL, "--limit", "560kB", *where)
    assert code == 0, output
    assert png.read_bytes()[:4] == b"\x89PNG" and f"the picture is in {png}" in output
    assert "cli_models:good on 2 virtual H100, 1f1b" in output
    assert "at most 0.53 MiB" in output and "of a step in which compute" in output
    beside = "min_offloaded_tensor_size=1"
    assert f'written to {path}; follow it with OffloadConfig(plan="{path}", {beside})' in output
    plan = OffloadConfig(plan=path).offload_plan
    assert plan is not None and plan.limit_bytes == 560_000
    made_for = {"num_microbatches": 4, "schedule": "Schedule1F1B"}
    assert plan.options == {"min_offloaded_tensor_size": 1} | made_for
    assert all(0 < rank.peak_bytes <= 560_000 for rank in plan.ranks)
    code, output = run("simulate", "cli_models:good", *SMALL, "--plan", str(path), "--json")
    assert code == 0, output
    found = json.loads(output)["with offload"]
    assert [rank["peak_bytes"] for rank in found["ranks"]] == [
        rank.peak_bytes for rank in plan.ranks
    ]


def test_what_is_as_fast_as_can_be_says_so() -> None:
    code, output = run("plan", "cli_models:good", *SMALL, "--limit", "1GiB")
    assert code == 0, output
    assert "a step, as long as the" in output and "and no plan is faster" in output
    assert "written to" not in output


@pytest.mark.parametrize("schedule", ["interleavedzerobubble", "zbv", "dualpipev"])
def test_backwards_in_two_parts(schedule: str) -> None:
    how = ["--schedule", schedule, "--virtual-stages", "2", "--limit", "1GiB"]
    code, output = run("plan", "cli_models:good", *SMALL, *how)
    assert code == 0, output
    assert f"on 2 virtual H100, {schedule}" in output


def test_ranks_and_devices_have_the_names_that_others_give_them() -> None:
    how = ["--pp", "3", "--device", "h200", "--limit", "1GiB"]
    code, output = run("plan", "cli_models:good", "--length", "256", "--microbatches", "4", *how)
    assert code == 0, output
    assert "cli_models:good on 3 virtual H200, 1f1b" in output


def test_a_limit_may_have_decimals(tmp_path: Path) -> None:
    """As sweep prints them: no whole number of bytes."""
    path = tmp_path / "plan.json"
    code, output = run("plan", "cli_models:good", *SMALL, "--limit", "0.95GiB", "-o", str(path))
    assert code == 0, output
    plan = OffloadConfig(plan=path).offload_plan
    assert plan is not None and plan.limit_bytes == 95 * 2**30 // 100


def test_host_memory_may_have_a_limit_too(tmp_path: Path) -> None:
    """With less, fewer groups leave."""
    path = tmp_path / "plan.json"
    where = ["--limit", "0.385GiB", "-o", str(path)]
    peaks = []
    for host_gib in ("1", "0.15"):
        code, output = run("plan", "cli_models:deep", *DEEP.split(), *where, "--host-gib", host_gib)
        assert code == 0, output
        plan = OffloadConfig(plan=path).offload_plan
        assert plan is not None
        peaks.append(max(rank.host_peak_bytes for rank in plan.ranks))
    assert 0 < peaks[1] <= 0.15 * 2**30 < peaks[0]


def test_groups_may_go_to_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    how = ["--tiers", "host,disk", "--host-gib", "0.0001"]
    code, output = run("plan", "cli_models:good", *SMALL, *how, "--limit", "560kB", "-o", str(path))
    assert code == 0, output
    beside = "tiers=('host', 'disk'), host_budget_bytes=107374, min_offloaded_tensor_size=1"
    assert f'follow it with OffloadConfig(plan="{path}", {beside})' in output
    code, output = run("simulate", "cli_models:good", *SMALL, *how, "--plan", str(path), "--json")
    assert code == 0, output
    plan = OffloadConfig(plan=path).offload_plan
    found = json.loads(output)["with offload"]
    assert plan is not None
    for name in ("peak_bytes", "host_peak_bytes"):
        assert [rank[name] for rank in found["ranks"]] == [getattr(one, name) for one in plan.ranks]
    code, output = run("sweep", "cli_models:good", *SMALL, *how, "--limits", "2")
    assert code == 0, output


def test_an_optimizer_is_part_of_the_peak(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for name in (None, "AdamW", "cli_models:optimizer"):
        with_it = [] if name is None else ["--optimizer", name]
        how = ["--limit", "1GiB", "-o", str(path), *with_it]
        code, output = run("plan", "cli_models:good", *SMALL, *how)
        assert code == 0, output
        said = "with the optimizer's state, at most" if name else "without an optimizer's state"
        assert f"Peaks are {said}" in output
        assert name is None or f"{name} ends a step" in output
        plan = OffloadConfig(plan=path).offload_plan
        assert plan is not None
        assert all((rank.optimizer_bytes > 0) is (name is not None) for rank in plan.ranks)
    code, output = run("profile", "cli_models:good", *SMALL, "--optimizer", "AdamW")
    assert code == 0 and "optimizer's state GiB" in output
    code, output = run("simulate", "cli_models:good", *SMALL, "--optimizer", "AdamW", "--json")
    assert code == 0, output


GOOD = "plan cli_models:good --ranks 2"
DEEP = "--ranks 2 --microbatches 4 --length 4096 --min-numel 1"
WRONG = {
    "plan cli_models:good": "Missing option '--limit'",
    "plan --limit 1GiB": "found neither of module:function and --hf, expected one of the two",
    "plan nowhere:good --limit 80": "found 80, which is 80 bytes; expected a size such as 80GiB",
    "plan nowhere:good --limit 0.5": "found 0.5, which is 0 bytes; expected a size such as 0.5GiB",
    "plan nowhere:good --limit 0": "found 0, which is 0 bytes; expected a size such as 70GiB",
    "plan nowhere:good --limit 81920": "found 81920, which is 81920 bytes; expected a size such as",
    "plan nowhere:good --limit 1048576": "no module 'nowhere' here or installed",
    f"{GOOD} --limit 1B": "--limit: limit_bytes is 1, expected at least",
    f"{GOOD} --limit 1B --no-recompute": "or leave out --no-recompute",
    f"{GOOD} --limit 1Gb": "found '1Gb', expected a number above 0 with a unit of B, kB",
    f"{GOOD} --limit many": "found 'many', expected a number above 0 with a unit of B, kB",
    f"{GOOD} --limit 1GiB --gib inf": "found inf, expected a finite number",
    f"{GOOD} --limit 1GiB --host-gib inf": "--host-gib: found inf, expected a finite number",
    f"plan cli_models:deep {DEEP} --limit 1B --host-gib 0.3": "give a larger host_budget_bytes tha",
    f"{GOOD} --limit 1GiB --tiers tape": "--tiers: OffloadConfig is invalid: tiers is the tuple",
    f"{GOOD} --limit 1GiB --optimizer adamw": "found 'adamw' (did you mean AdamW?), expected a cl",
    f"{GOOD} --limit 1GiB --optimizer adafactr": "found 'adafactr' (did you mean Adafactor?), expe",
    f"{GOOD} --limit 1GiB --optimizer SGDM": "found 'SGDM' (did you mean SGD?), expected a class",
    f"{GOOD} --limit 1GiB --device h10": "found 'h10' (did you mean H100?), expected one of A100",
    f"{GOOD} --limit 1GiB --schedule 1F1B": "(did you mean 1f1b?)",
    f"{GOOD} --limit 1GiB --schedule ZBV": "(did you mean zbv?)",
    f"{GOOD} --limit 1GiB --optimizer Adafactor": "--optimizer: the optimizer is Adafactor, expec",
    f"{GOOD} --limit 1GiB --optimizer Muon": "--optimizer: Muon cannot be made of the parameters",
    f"{GOOD} --limit 1GiB --optimizer Optimizer": "--optimizer: Optimizer cannot be made of the pa",
    f"{GOOD} --limit 1GiB --microbatches 1": "--schedule: Schedule1F1B is no schedule of 2 stages",
    f"{GOOD} --limit 1GiB --schedule interleaved1f1b --microbatches 17": "(8), but got 17; give a",
    f"{GOOD} --limit 1GiB --optimizer cli_models:KIND": "KIND of cli_models is no function, expec",
    f"{GOOD} --limit 1GiB --optimizer cli_models:no_optimizer": "--optimizer: cli_models:no_op",
    "plan cli_models:head_on_the_last --ranks 2 --limit 1GiB": "pipeline rank 0 has no module of "
    "group 'head' in stage 0: pattern 'head' matches no module; near names",
    f"{GOOD} --limit 1GiB -o /nowhere/plan.json": "expected a file in a directory that is there",
    "plan nowhere:good --limit 1GiB --png plan.gif": "--png: plan.gif ends otherwise than",
    f"{GOOD} --limit 1GiB --png plan.gif": "ends otherwise than pictures do",
    "plan cli_models:twice --ranks 2 --limit 1GiB --schedule zbv": "or stage saved as well",
    "simulate cli_models:good --ranks 2 --plan nowhere.json": "No such file or directory",
    "simulate cli_models:good --ranks 2 --plan cli_models.py": "cli_models.py holds no plan",
}


@pytest.mark.parametrize("command", WRONG)
def test_what_cannot_be_right(command: str) -> None:
    code, output = run(*command.split())
    assert code == 2
    plain = output.replace("│", " ")
    assert WRONG[command] in " ".join(plain.split()), output


def test_an_optimizer_that_the_model_brings_is_the_model_s() -> None:
    code, output = run("profile", "cli_models:with_lbfgs", *SMALL)
    assert code == 2 and "for MODEL or --schedule: the optimizer is LBFGS, expected" in output


def test_an_error_of_a_function_that_makes_an_optimizer_keeps_its_traceback() -> None:
    with pytest.raises(ValueError, match="what went wrong in my optimizer"):
        run(*GOOD.split(), "--limit", "1GiB", "--optimizer", "cli_models:broken_optimizer")


def test_a_plan_for_another_pipeline(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert run("plan", "cli_models:good", *SMALL, "--limit", "1GiB", "-o", str(path))[0] == 0
    code, output = run("simulate", "cli_models:good", "--plan", str(path), *SMALL, "--ranks", "3")
    assert code == 2 and "the plan is for 2 pipeline ranks, and this is rank 2" in output
    code, output = run("simulate", "cli_models:good", "--plan", str(path), "--fraction", "0.5")
    assert code == 2 and "expected one way to say what stays" in output
