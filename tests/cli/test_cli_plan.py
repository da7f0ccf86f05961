"""``pp-offload plan``, ``profile``, ``sweep``, ``simulate``, ``trace`` and ``compare``.

What is printed, files that are followed, a picture, and what is refused.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import check_refused, good, run
from helpers.traces import GIB, timeline_of

from pp_offload import OffloadConfig
from pp_offload.plan import OffloadPlan
from pp_offload.trace import Span, Timeline, part_of, read, write
from pp_offload.trace.figures import rank_steps

SIZES = "--ranks 2 --microbatches 4 --length 256 --min-numel 1".split()
SMALL = ("helpers.cli_models:good", *SIZES)
DEEP = ("helpers.cli_models:deep", *SIZES, "--length", "1024", "--gib", 0.01)


def planned(path: Path) -> list[int]:
    """Peaks of ranks in a plan that the engine takes."""
    plan = OffloadConfig(plan=path).offload_plan
    assert plan is not None and all(rank.peak_bytes <= plan.limit_bytes for rank in plan.ranks)
    return [rank.peak_bytes for rank in plan.ranks]


def peaks(*arguments: object) -> list[int]:
    """Peaks of ranks that ``simulate`` sees."""
    figures = json.loads(good("simulate", *arguments, "--json"))
    return [rank["peak_bytes"] for rank in figures["with offload"]["ranks"]]


def test_a_plan_that_the_engine_follows(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    output = good("plan", *SMALL, "--limit", "560kB", "-o", path)
    assert output.startswith("helpers.cli_models:good on 2 virtual H100, 1f1b")
    assert "Everything fits in 546.88 KiB" in output and "433.00KiB" in output
    how = f'follow it with OffloadConfig(plan="{path}", min_offloaded_tensor_size=1)\n'
    assert output.endswith(f"written to {path}; {how}")
    assert OffloadPlan.load(path).limit_bytes == 560_000
    code, output = run("plan", *SMALL, "--limit", "560kB", "-o", "/dev/full")
    assert code == 2 and "433.00KiB" in output
    assert "Invalid value for --output: [Errno 28] No space left on device" in output
    assert peaks(*SMALL, "--plan", path) == planned(path)


def test_groups_stay_for_want_of_host_memory(tmp_path: Path) -> None:
    path, how = tmp_path / "plan.json", ("--host-gib", 0.0001)
    output = good("plan", *SMALL, *how, "--limit", "800kB", "-o", path)
    assert ", host_budget_bytes=107374, min_offloaded_tensor" in output
    assert peaks(*SMALL, *how, "--plan", path) == planned(path)


@pytest.mark.parametrize("name", ["AdamW", "helpers.cli_models:optimizer"])
def test_an_optimizer_is_part_of_the_peak(tmp_path: Path, name: str) -> None:
    path = tmp_path / "plan.json"
    output = good("plan", *SMALL, "--limit", "1GiB", "-o", path, "--optimizer", name)
    assert "\nEverything fits in 1.00 GiB: no group needs to leave, and a step takes " in output
    assert f"{name} ends a step" in output and "with the optimizer's state, at most" in output
    assert all(rank.optimizer_bytes for rank in OffloadPlan.load(path).ranks)
    assert "optimizer's state GiB" in good("profile", *SMALL, "--optimizer", name)


@pytest.mark.parametrize(("model", "num", "num_plans"), [(SMALL, 2, 1), (DEEP, 3, 3)])
def test_a_sweep_has_a_row_for_each_limit(
    tmp_path: Path, model: Any, num: int, num_plans: int
) -> None:
    """The least limit can be typed."""
    path = tmp_path / "front.png"
    output = good("sweep", *model, "--limits", num, "--png", path)
    rows = {line[:6]: line.split() for line in output.splitlines() if line.startswith("plan ")}
    assert list(rows) == [f"plan {number}" for number in range(num_plans)]
    assert "without offload" in output and "all recomputed" not in output
    assert path.read_bytes().startswith(b"\x89PNG")
    limit = rows["plan 0"][2]
    typed = limit if limit[-1] == "B" else f"{limit}GiB"
    assert typed[:-3] in good("plan", *model, "--limit", typed)


def test_figures_of_a_sweep() -> None:
    figures = json.loads(good("sweep", *SMALL, "--limits", 2, "--json"))
    last = OffloadPlan.from_dict(figures["plans"][-1])
    assert last.limit_bytes == max(figures["without offload"]["peak_bytes"])
    assert last.seconds == pytest.approx(figures["without offload"]["seconds"])
    assert figures["all recomputed"] is None, "the model does not say which layers may be"


MEGATRON = ("plan", "helpers.cli_models:as_megatron", *DEEP[1:], "--for", "megatron", "--limit")


def test_flags_of_megatrons_own_engine(tmp_path: Path) -> None:
    """By them no stage keeps more groups than planned."""
    path = tmp_path / "plan.json"
    output = good(*MEGATRON, "75MiB", "--no-recompute", "-o", path)
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
    assert "--recompute-granularity full --recompute-method block" in good(*MEGATRON, "75MiB")


# Simulate


def test_a_title_says_what_runs_and_only_chosen_groups_leave(tmp_path: Path) -> None:
    trace = tmp_path / "out.json.gz"
    output = good("simulate", *SMALL, "--trace", trace, "--pp", 3, "--device", "H200")
    assert "cli_models:good on 3 virtual H200, 1f1b, 1 stage each, 4 microbatches of 256" in output
    assert "linear and gelu may leave" in output and read(trace).ranks == [0, 1, 2]
    figures = json.loads(good("simulate", *SMALL, "--json", "--groups", "linear"))
    first, last = figures["with offload"]["ranks"]
    assert first["bytes_offloaded"] > 0 == last["bytes_offloaded"], "the last group stays"


def test_the_limit_of_a_plan_and_a_plan_of_another_pipeline(tmp_path: Path) -> None:
    """The exit code is 1 where a rank is above the limit."""
    path, lower = tmp_path / "plan.json", tmp_path / "lower.json"
    good("plan", *DEEP, "--limit", "300MiB", "-o", path)
    output = good("simulate", *DEEP, "--plan", path)
    assert output.endswith("The plan's limit is 0.29 GiB, and no rank is above it.\n")
    replace(OffloadPlan.load(path), limit_bytes=max(planned(path)) - 2**20).save(lower)
    code, output = run("simulate", *DEEP, "--plan", lower)
    assert code == 1 and output.endswith("above it is rank 0 by 1.00 MiB.\n"), output
    code, output = run("simulate", *DEEP, "--plan", path, "--ranks", 3)
    assert code == 2 and "the plan is for 2 pipeline ranks, and here is a rank 2" in output
    code, output = run("simulate", *DEEP, "--plan", path, "--fraction", 0.5)
    assert code == 2 and "expected one way to say what stays" in output


# Traces


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "out.json.gz"
    write(timeline_of(0, 1), path)
    return path


def rows_of(output: str) -> dict[str, dict[str, str]]:
    """Cells by column, by rank."""
    lines = output.splitlines()
    head = next(line for line in lines if line.startswith("rank")).replace(" peak", "  peak")
    names = [name.strip() for name in head.split("  ") if name.strip()]
    rows = [line.split() for line in lines if line[:1].isdigit()]
    return {row[0]: dict(zip(names, row, strict=True)) for row in rows}


def test_a_row_for_each_rank(file: Path) -> None:
    output = good("trace", file)
    assert output.startswith("step 5; the trace has step 5\n")
    rows = rows_of(output)
    assert list(rows) == ["0", "1"]
    expected = {"step ms": "100.0", "busy": "-", "for reload": "30.0", "offload": "0.0"}
    expected |= {"disk": "1.0", "others": "20.0", "off GB/s": "21.5", "back GB/s": "53.7"}
    expected |= {"peak device": "6.000", "peak host": "1.000"}
    assert rows["1"] | expected == rows["1"]
    assert list(rows_of(good("trace", file, "--rank", 1))) == ["1"]
    files = [part_of(file, rank) for rank in range(2)]
    for rank, path in enumerate(files):
        write(timeline_of(rank), path)
    assert list(rows_of(good("trace", *files))) == ["0", "1"], "files of ranks"
    (rank,) = json.loads(good("trace", file, "--json", "--rank", 1))["ranks"]
    step = rank_steps(read(file), 5)[1]
    assert rank["rank"] == 1 and rank["seconds"] == step.end_s - step.begin_s
    assert rank["waited_s"] == {kind.value: s for kind, s in step.waited_s.items()}


def test_a_disk_has_columns_and_missing_spans_a_caution(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    timeline = timeline_of(0, 1)
    write(timeline, path)
    output = good("trace", path)
    assert "written GiB" not in output and "ranks 1" not in output
    timeline.spans += [
        Span(0, "disk 2", "write", 1.03, 1.05, {"bytes": GIB // 2}),
        Span(0, "d2h", "mlp (offload)", 0.99, 1.005, {"bytes": GIB}),  # began before the step
        Span(0, "h2d", "mlp (reload)", 1.08, 1.1, {"bytes": GIB}),
        Span(0, "compute 2", "waits for mlp (offload)", 0.99, 1.002),
    ]
    timeline.metadata[1]["has_captures"] = True
    write(timeline, path)
    output = good("trace", path)
    assert "ranks 1: work of captured CUDA graphs is missing" in output
    expected = {"written GiB": "0.500", "read GiB": "0.000", "offload": "2.0"}
    expected |= {"off GB/s": "21.5", "back GB/s": "53.7", "peak host": "1.000"}
    assert rows_of(output)["0"] | expected == rows_of(output)["0"]


def test_a_picture(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.png"
    output = good("trace", file, "--png", out, "--rank", 1, "--step", 5)
    assert output == f"step 5 of ranks 1 is in {out}\n"
    assert out.read_bytes()[1:4] == b"PNG"
    assert json.loads(good("trace", file, "--png", out, "--json"))["ranks"]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    check_refused(f"trace {file} --png {out}", "pip install matplotlib")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    good("plan", *SMALL, "--limit", "560kB", "-o", path)
    return path


def test_a_run_beside_its_plan_and_one_of_something_else(plan: Path, tmp_path: Path) -> None:
    trace = tmp_path / "run.json.gz"
    good("simulate", *SMALL, "--plan", plan, "--trace", trace)
    output = good("compare", plan, trace)
    assert output.startswith("helpers.cli_models:good on 2 virtual H100, 1f1b")
    assert output.endswith("nothing is worse than planned by more than 2%\n")
    figures = json.loads(good("compare", plan, trace, "--json", "--step", 0))
    assert figures["as_planned"] and figures["step"] == 0
    run("simulate", *SMALL, "--microbatches", 6, "--plan", plan, "--trace", trace)
    code, output = run("compare", plan, trace)
    assert code == 1
    assert "the plan is of 4 microbatches in a step, which has 6" in output


WRONG = {
    "trace FILE --step 4": "--step: step is 4, expected one of the trace: [5]",
    "trace FILE --rank 2": "found 2, expected one that has step 5: [0, 1]",
    "trace FILE --png out.gif": "out.gif ends otherwise than pictures do, expected .png, .svg",
    "trace EMPTY": "--step: the trace has no step",
    "trace nothing.json": "FILE: found no file nothing.json",
    "trace .": "FILE: found no file .",
    "trace TEXT": "cannot be read as a trace",
    "compare PLAN FILE --step 9": "PLAN or --step: step is 9, expected one of the trace: [5]",
    "compare TEXT FILE": "PLAN: TEXT holds no plan",
    "compare nothing.json FILE": "PLAN: [Errno 2] No such file",
    "compare PLAN THREE": "PLAN or --step: the plan is for 2 pipeline ranks, and here is a rank 2",
}


@pytest.mark.parametrize("typed", WRONG)
def test_what_cannot_be_right_is_refused(
    typed: str, plan: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Timeline(0, metadata={0: {}}), "EMPTY")
    write(timeline_of(0, 1, 2), "THREE")
    Path("TEXT").write_text("not JSON\n")
    check_refused(typed.replace("FILE", file.name).replace("PLAN", str(plan)), WRONG[typed])
