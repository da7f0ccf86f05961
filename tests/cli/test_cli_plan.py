"""``pp-offload plan``, ``profile`` and ``sweep``: tables, files that others follow, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.cli import check_refused, good

from pp_offload import OffloadConfig
from pp_offload.plan import OffloadPlan

SIZES = "--ranks 2 --microbatches 4 --length 256 --min-numel 1".split()
SMALL = ("helpers.cli_models:good", *SIZES)
DEEP = ("helpers.cli_models:deep", *SIZES, "--length", "1024")


def peaks(figures: str) -> list[int]:
    return [rank["peak_bytes"] for rank in json.loads(figures)["with offload"]["ranks"]]


def test_a_plan_that_the_engine_follows(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    output = good("plan", *SMALL, "--limit", "560kB", "-o", path)
    assert output.startswith("helpers.cli_models:good on 2 virtual H100, 1f1b")
    assert "Everything fits in 546.88 KiB" in output and "433.00KiB" in output
    how = f'follow it with OffloadConfig(plan="{path}", min_offloaded_tensor_size=1)\n'
    assert output.endswith(f"written to {path}; {how}")
    plan = OffloadConfig(plan=path).offload_plan
    assert plan is not None and plan.limit_bytes == 560_000
    assert all(0 < rank.peak_bytes <= 560_000 for rank in plan.ranks)
    figures = good("simulate", *SMALL, "--plan", path, "--json")
    assert peaks(figures) == [rank.peak_bytes for rank in plan.ranks]


def test_groups_stay_for_want_of_host_memory(tmp_path: Path) -> None:
    path, how = tmp_path / "plan.json", ("--host-gib", 0.0001)
    output = good("plan", *SMALL, *how, "--limit", "800kB", "-o", path)
    assert ", host_budget_bytes=107374, min_offloaded_tensor" in output
    plan = OffloadConfig(plan=path).offload_plan
    assert plan is not None
    figures = good("simulate", *SMALL, *how, "--plan", path, "--json")
    assert peaks(figures) == [rank.peak_bytes for rank in plan.ranks]


@pytest.mark.parametrize("name", ["AdamW", "helpers.cli_models:optimizer"])
def test_an_optimizer_is_part_of_the_peak(tmp_path: Path, name: str) -> None:
    path = tmp_path / "plan.json"
    output = good("plan", *SMALL, "--limit", "1GiB", "-o", path, "--optimizer", name)
    assert f"{name} ends a step" in output and "with the optimizer's state, at most" in output
    plan = OffloadConfig(plan=path).offload_plan
    assert plan is not None and all(rank.optimizer_bytes for rank in plan.ranks)
    assert "optimizer's state GiB" in good("profile", *SMALL, "--optimizer", name)


def test_a_profile_has_a_row_for_each_kind_and_each_stage() -> None:
    """24 layers of width 1024 that save input and product of 1,024 tokens: 2 MiB each."""
    output = " ".join(good("profile", *DEEP).split())
    assert output.startswith("helpers.cli_models:deep on 2 virtual H100, 1f1b")
    assert "layer 0 1 4.0 " in output and "layer 0-1 22 4.0 " in output
    figures = json.loads(good("profile", *DEEP, "--json"))
    assert [group["nbytes"] for group in figures["groups"]] == [4 * 2**20] * 24
    assert [stage["rank"] for stage in figures["stages"]] == [0, 1]


def test_a_sweep_has_a_row_for_each_limit(tmp_path: Path) -> None:
    path = tmp_path / "front.png"
    output = good("sweep", *DEEP, "--gib", 0.01, "--limits", 3, "--png", path)
    assert "plan 0" in output and "plan 2" in output and "plan 3" not in output
    assert "without offload" in output and "all recomputed" not in output
    assert path.read_bytes().startswith(b"\x89PNG")
    figures = json.loads(good("sweep", *DEEP, "--gib", 0.01, "--limits", 3, "--json"))
    plans = [OffloadPlan.from_dict(plan) for plan in figures["plans"]]
    assert plans[-1].limit_bytes == max(figures["without offload"]["peak_bytes"])
    assert plans[-1].seconds == pytest.approx(figures["without offload"]["seconds"])
    assert figures["all recomputed"] is None, "the model does not say which layers may be"


def test_the_least_limit_of_a_sweep_can_be_typed() -> None:
    for model in (SMALL, DEEP):
        lines = good("sweep", *model, "--limits", 2).splitlines()
        limit = next(line for line in lines if line.startswith("plan 0")).split()[2]
        typed = limit if limit[-1] == "B" else f"{limit}GiB"
        assert typed[:-3] in good("plan", *model, "--limit", typed)


def test_where_everything_fits_a_sentence_says_so() -> None:
    output = good("plan", *SMALL, "--limit", "1GiB")
    assert "\nEverything fits in 1.00 GiB: no group needs to leave, and a step takes " in output


GOOD = "plan helpers.cli_models:good --ranks 2"
WRONG = {
    "plan nowhere:good --limit 1048576": "no module 'nowhere' here",
    f"{GOOD} --limit 80": "--limit: limit_bytes is 80, expected at least",
    f"{GOOD} --limit 1Gb": "found '1Gb', expected a number above 0 with a unit of B, kB",
    f"{GOOD} --limit 1B": "--limit: limit_bytes is 1, expected at least",
    f"{GOOD} --limit 1GiB -o /nowhere/plan.json": "--output: found /nowhere/plan.json, expected a",
    f"plan {' '.join(DEEP)} --gib 0.01 --limit 125MiB --for megatron": "expected names of Megatron",
    "plan helpers.cli_models:head_on_the_last --ranks 2 --limit 1GiB": "pattern 'head' matches no",
    "plan helpers.cli_models:twice --ranks 2 --limit 1GiB --schedule zbv": "or stage saved as well",
    "sweep helpers.cli_models:good --png front.txt": "front.txt ends otherwise than pictures do",
    "profile helpers.cli_models:with_lbfgs": "for MODEL or --schedule: the optimizer is LBFGS",
}


@pytest.mark.parametrize("command", WRONG)
def test_what_cannot_be_right_is_refused(command: str) -> None:
    check_refused(command, WRONG[command])


MEGATRON = "plan helpers.cli_models:as_megatron --ranks 2 --length 1024 --microbatches 4".split()
MEGATRON += "--min-numel 1 --for megatron --limit".split()


def test_flags_of_megatrons_own_engine(tmp_path: Path) -> None:
    """By them no stage keeps more groups than planned."""
    path = tmp_path / "plan.json"
    output = good(*MEGATRON, "125MiB", "--gib", 0.01, "--no-recompute", "-o", path)
    flags = output.split("Flags of Megatron-LM:\n")[1].split("Its")[0].split()
    assert " ".join(flags).startswith("--fine-grained-activation-offloading --offload-modules core")
    options = dict(zip(flags[4::2], flags[5::2], strict=True))
    assert options["--min-offloaded-tensor-size"] == "1"
    fraction = float(options["--activation-offload-fraction"])
    assert 0 < fraction < 1 and int(options["--delta-offload-bytes-across-pp-ranks"]) > 0
    for rank in OffloadPlan.load(path).ranks:
        for groups in rank.stages:
            num_stay = sum(group.keeps for group in groups)
            assert int(len(groups) * (1 - fraction)) <= num_stay


def test_flags_of_recomputed_layers() -> None:
    assert "Megatron-LM needs no flags: nothing is offloaded" in good(*MEGATRON, "1GiB")
    assert "--recompute-granularity full --recompute-method block" in good(*MEGATRON, "125MiB")
