"""Each example: offload changes memory and no bit, which figures and output say; wrong flags are
explained. And benchmarks run and write every figure they promise, which are not judged here.

All but the ranks of train_gpt.py run in this process: another would import for some seconds.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.processes import ROOT, run_example, run_here, train

from pp_offload.plan import OffloadPlan
from pp_offload.trace import read

EQUAL = "equal bit for bit"
TRAIN = "--steps 3 --microbatches 4 --layers 4 --width 32 --context 32 --min-numel 1"
CHECKPOINT = "--steps 2 --layers 4 --width 32 --context 32 --batch 4"
OFFLOAD_MODEL = "--steps 3 --layers 6 --width 32 --context 16 --batch 4 --slices 4"
FINETUNE = "--steps 3 --layers 2 --width 32 --context 64"
STREAM = "--steps 3 --layers 4 --width 32 --context 16 --batch 2"
PLAN = "--quick --microbatches 6"

Run = Callable[..., tuple[Any, str]]


@pytest.fixture
def run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a script with flags; its figures and its output."""

    def run(script: str | Path, *flags: str, out: str = "--json") -> tuple[Any, str]:
        path = tmp_path / "figures.json"
        assert not run_here(script, *" ".join(flags).split(), out, str(path))
        return json.loads(path.read_text()), capfd.readouterr().out

    return run


def rows_of(output: str) -> list[list[str]]:
    """The cells of lines that begin with a rank."""
    return [line.split() for line in output.splitlines() if line[:1].isdigit()]


def check_training(figures: dict[str, Any], output: str) -> None:
    """What holds for every comparison of two ranks of train_gpt.py."""
    assert figures["bitwise_equal"] is True
    assert figures["loss_last_on"] < figures["loss_first_on"]
    assert figures["loss_first_on"] == figures["loss_first_off"]
    assert figures["loss_last_on"] == figures["loss_last_off"]
    assert figures["step_ms_off"] > 0 and figures["step_ms_on"] > 0
    for key in ("offloaded_bytes_on", "host_peak_bytes_on"):
        assert len(figures[key]) == 2 and min(figures[key]) > 0, key
    peaks = zip(figures["device_bytes_peak_on"], figures["device_bytes_peak_off"], strict=True)
    assert all(0 < on < off for on, off in peaks)
    assert EQUAL in output and "offloaded at the peak of a step" in output


@pytest.mark.parametrize(
    ("schedule", "mark"),
    [("interleaved1f1b", "markers"), pytest.param("1f1b", "modules", marks=pytest.mark.slow)],
)
def test_training_on_two_ranks(run: Run, schedule: str, mark: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json.gz"
    check_training(
        *run("train_gpt.py", TRAIN, f"--schedule {schedule} --mark {mark} --trace {out}")
    )
    assert {path.name for path in tmp_path.iterdir()} == {"figures.json", "out.json.gz"}
    timeline = read(out)
    assert timeline.ranks == [0, 1]
    for rank in timeline.ranks:
        assert len(timeline.of(rank, "steps")) == 2
        names = Counter(item.name for item in timeline.of(rank, "compute"))
        for group in ("attn", "mlp"):  # of 2 layers, 4 microbatches, 2 steps
            assert names[f"{group} (forward)"] == names[f"{group} (backward)"] == 2 * 4 * 2


@pytest.mark.slow
def test_training_under_torchrun(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    check_training(*train(tmp_path / "figures.json", launcher=launcher))


@pytest.mark.slow
def test_training_by_a_plan_of_its_own(run: Run) -> None:
    """Under the limit, bit for bit equal, and each rank sends what was planned, to the byte."""
    flags = "--steps 2 --microbatches 6 --plan auto --device-budget-mib 18"
    figures, output = run("train_gpt.py", flags)
    assert EQUAL in output
    both = zip(figures["device_bytes_peak_on"], figures["parameter_bytes_on"], strict=True)
    assert max(map(sum, both)) <= 18 * 2**20
    assert figures["offloaded_bytes_on"][0] > figures["offloaded_bytes_on"][1]
    sent = [row[3:] for row in rows_of(output.partition("at most 18 MiB by the plan")[2])]
    assert len(sent) == 2 and all(planned == measured for planned, measured in sent)


def test_five_ways_with_checkpoints(run: Run) -> None:
    result, output = run("checkpoint_and_offload.py", CHECKPOINT)
    assert EQUAL in output and result.pop("bitwise_equal") is True
    assert list(result) == ["none", "full", "selective-op", "offload", "both"]
    assert list(result) == [line.split()[0] for line in output.splitlines()[2:7]]
    held = {way: figures["held_bytes"] for way, figures in result.items()}
    assert held["full"] < held["selective-op"] < held["none"]
    assert held["offload"] < held["none"] and held["both"] < held["selective-op"]
    again = {way: figures["recomputed_ops"] for way, figures in result.items()}
    assert again["none"] == again["offload"] == 0
    assert 0 < again["selective-op"] == again["both"] < again["full"]
    moved = {way: figures["offloaded_bytes"] for way, figures in result.items()}
    assert moved["none"] == moved["full"] == moved["selective-op"] == 0
    assert moved["both"] > 0 and moved["offload"] > 0


@pytest.mark.quick(2)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_three_ways_with_parameters_on_the_host(run: Run, microbatches: int) -> None:
    result, output = run("offload_model.py", OFFLOAD_MODEL, f"--microbatches {microbatches}")
    assert EQUAL in output and result.pop("bitwise_equal") is True
    assert list(result) == ["on the device", "in slices", "run again"]
    whole, *others = result.values()
    assert all(f"\n{way}  " in output for way in result)
    assert whole["loss_last"] < whole["loss_first"]
    assert whole["brought_bytes"] == whole["sent_bytes"] == 0
    for figures in others:
        assert figures["loss_first"] == whole["loss_first"]
        assert figures["loss_last"] == whole["loss_last"]
        assert figures["parameter_bytes"] < 0.7 * whole["parameter_bytes"]
        assert figures["sent_bytes"] == whole["parameter_bytes"]
        assert figures["sent_bytes"] < figures["brought_bytes"] < 2 * whole["parameter_bytes"]


@pytest.mark.parametrize("flags", ["--full", "--activation-checkpointing"])
def test_finetuning_with_the_trainer(run: Run, flags: str) -> None:
    pytest.importorskip("peft")
    figures, output = run("finetune_lora.py", FINETUNE, flags)
    without, offload = figures["without"], figures["with"]
    assert EQUAL in output and offload["losses"] == without["losses"]
    assert offload["losses"][-1] < offload["losses"][0]
    assert 0 < offload["held_bytes"] < without["held_bytes"]
    assert offload["offloaded_bytes"] > 0 < offload["host_peak_bytes"]
    assert without["offloaded_bytes"] == 0


@pytest.mark.parametrize("resident", [1, 2])
@pytest.mark.parametrize("more", ["", "--activation-checkpointing"], ids=["kept", "again"])
@pytest.mark.parametrize("weights", ["", "--full"], ids=["lora", "full"])
def test_streaming_layers(run: Run, weights: str, more: str, resident: int) -> None:
    pytest.importorskip("peft")
    figures, output = run("stream_layers.py", STREAM, weights, more, f"--resident {resident}")
    whole, streamed = figures["on the device"], figures["on the host"]
    assert EQUAL in output and streamed["losses"] == whole["losses"]
    assert whole["losses"][-1] < whole["losses"][0]
    assert streamed["layer_bytes"] == whole["layer_bytes"] * resident // 4
    assert whole["brought_bytes"] == whole["sent_bytes"] == 0 < streamed["brought_bytes"]
    assert streamed["sent_bytes"] == (whole["layer_bytes"] if weights else 0)


def test_planning(run: Run, tmp_path: Path) -> None:
    _, output = run("plan_llama.py", PLAN, "--limit-gib 0.04", out="-o")
    plan = OffloadPlan.load(tmp_path / "figures.json")
    assert plan.limit_bytes == int(0.04 * 2**30)
    assert all(rank.peak_bytes <= plan.limit_bytes for rank in plan.ranks)
    peaks = [f"{rank.peak_bytes / 2**30:.2f}" for rank in plan.ranks]
    assert [row[2] for row in rows_of(output)] == peaks


@pytest.mark.parametrize(
    ("schedule", "in_flight"),
    [
        ("zbv", [4, 4]),
        pytest.param("1f1b", [2, 1], marks=pytest.mark.slow),
        pytest.param("interleaved1f1b", [5, 3], marks=pytest.mark.slow),
    ],
)
def test_simulating(run: Run, schedule: str, in_flight: list[int], tmp_path: Path) -> None:
    trace = tmp_path / "trace.json.gz"
    flags = f"--quick --schedule {schedule} --groups attn,mlp --gib 0 --trace {trace}"
    figures, output = run("simulate_llama.py", flags)
    assert f"Llama tiny on 2 virtual H100, {schedule}" in output
    assert list(figures) == ["without offload", "with offload"]
    none, ours = (step["ranks"] for step in figures.values())
    rows = rows_of(output)
    assert len(rows) == 2 and read(trace).ranks == [0, 1]
    for number, (without, with_it) in enumerate(zip(none, ours, strict=True)):
        assert without["num_in_flight"] == with_it["num_in_flight"] == in_flight[number]
        assert without["bytes_offloaded"] == without["host_peak_bytes"] == 0
        assert with_it["bytes_offloaded"] > 0 and with_it["host_peak_bytes"] > 0
        assert with_it["peak_bytes"] < without["peak_bytes"]
        peaks_gib = [f"{each['peak_bytes'] / 2**30:.2f}" for each in (without, with_it)]
        assert rows[number][:3] == [str(number), *peaks_gib]


WRONG = {
    "train_gpt.py": {
        "--groups moe": "unknown groups ['moe']",
        "--schedule zbv --virtual-stages 3": "zbv takes --virtual-stages 2",
        "--schedule 2f2b": "none of gpipe, 1f1b, interleaved1f1b",
        "--text no/such/file": "is not a file",
        "--disk-dir /tmp": "needs --tier disk",
        "--trace no/such/out.json": "expected a file in a directory that is there",
        "--device emulated": "needs --stages 1",
        "--mark markers --groups mlp_norm": "mark only attn and mlp",
    },
    "simulate_llama.py": {
        "--groups moe": "--groups is 'moe', expected attn, mlp or attn,mlp",
        "--microbatches 0": "num_microbatches is 0, expected an integer of at least 1",
        "--ranks 40": "there are 32 layers, fewer than stages",
        "--virtual-stages 2": "1f1b takes --virtual-stages 1",
    },
    "plan_llama.py": {
        f"{PLAN} --limit-gib 0.001": "--limit-gib: limit_bytes is 1073741 (1.02 MiB), expected at"
    },
}


@pytest.mark.parametrize("script", WRONG)
def test_wrong_flags_are_explained(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, message in WRONG[script].items():
        with pytest.raises(SystemExit) as stopped:
            run_here(script, *flags.split())
        errors = capsys.readouterr().err
        assert stopped.value.code == 2 or script == "plan_llama.py"
        assert message in f"{stopped.value.code} {errors}", flags


# Benchmarks

BENCHMARKS = ROOT / "benchmarks"


@pytest.mark.quick("disk_tier.py")
@pytest.mark.parametrize(
    ("name", "positive"),
    [
        ("hook_overhead.py", "ratio_to_floor ratio_to_floor_lagging"),
        ("host_memory.py", "footprint_ratio"),
        ("steps.py", "reset_ms_per_10000_groups"),
        ("disk_tier.py", "throughput_ratio cached_ratio checksum_mib_per_s"),
    ],
)
def test_a_benchmark_writes_its_figures(name: str, positive: str, run: Run) -> None:
    figures, _ = run(BENCHMARKS / name, "--quick")
    assert all(figures[key] for key in positive.split())


@pytest.mark.slow
def test_frontier_writes_its_figures(run: Run) -> None:
    """All groups stay where there is room; recompute and ``save_on_cpu`` take longer."""
    figures, _ = run(BENCHMARKS / "frontier.py", "--quick gpt4096")
    rows = {row["way"]: row for row in figures["gpt4096"]}
    none, all_stay = rows["none"], rows["limit 1"]
    recompute, on_cpu = rows["recompute 2"], rows["save_on_cpu 2"]
    assert none["ratio"] == 1 <= all_stay["ratio"] < recompute["ratio"] < on_cpu["ratio"]
    assert recompute["peak_gib"] < all_stay["peak_gib"] <= none["peak_gib"]
    assert all_stay["copied_gib"] == 0 < all_stay["again_gib"]
    if "megatron 2" in rows:
        assert rows["waiting 2"]["peak_gib"] < none["peak_gib"] < rows["megatron 2"]["peak_gib"]
        assert rows["waiting 2"]["step_ms"] > rows["megatron 2"]["step_ms"] > none["step_ms"]


@pytest.mark.slow
def test_what_a_gpu_is_asked_is_asked_of_a_cpu(tmp_path: Path) -> None:
    """All but the tests that need one."""
    flags = ["--out", str(tmp_path), "--device", "cpu", "--cases", "tiny"]
    run_example(ROOT / "tools/on_gpu.py", *flags, "--parts", "doctor", "tiny", "peers")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    ways = [row["way"] for row in rows if "way" in row]
    assert {"default", "limit-0.7", "ours-copied", "recompute", "save_on_cpu"} <= set(ways)
    assert all(row["same"] and row["ms"] > 0 for row in rows if "same" in row)
    outcomes = json.loads((tmp_path / "outcomes.json").read_text())
    assert all(outcome.startswith("ended") for outcome in outcomes.values())


@pytest.mark.slow
def test_rematerialize_writes_its_figures(run: Run) -> None:
    pytest.importorskip("transformers")
    figures, _ = run(BENCHMARKS / "rematerialize.py", "--quick")
    for row in figures["models"]:
        assert row["none_equal"] and row["cheap_equal"]
        assert 0 < row["cheap_bytes"] < row["none_bytes"] and row["again_bytes"] > 0
    ours = [row for row in figures["virtual"] if row["way"] == "ours, cheap"]
    assert len(ours) == 1 and all(row["bytes"] < 0.7 and row["compute"] > 1 for row in ours)


def test_a_virtual_h100_is_as_the_real_one_was(run: Run) -> None:
    """A step of GPT without offload, and where its layers are recomputed."""
    rows, _ = run(BENCHMARKS / "h100.py", "--quick")
    assert [row["way"] for row in rows] == ["none", "recompute"]
    for row in rows:
        assert row["here_peak_gib"] == pytest.approx(row["peak_gib"], rel=1e-3)
        assert row["here_ratio"] == pytest.approx(row["ratio"], rel=0.03)
