"""The command line as a new user types it: help, versions, what is refused, and ``doctor``."""

from __future__ import annotations

import json
import platform
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.cli import check_refused, good, run

from pp_offload import OffloadConfig, __version__
from pp_offload._memory.budget import HostBudget
from pp_offload.cli import doctor
from pp_offload.cli.arguments import ARGUMENTS, COMMANDS
from pp_offload.simulate import DEVICES, Hardware
from pp_offload.simulate.schedules import SCHEDULES

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["numpy"] = None
from pp_offload.cli import main
main(sys.argv[1:])
"""


def test_versions_are_those_of_a_bug_report() -> None:
    version = f"torch {torch.__version__}, Python {platform.python_version()}"
    assert good("--version") == f"pp_offload {__version__}, {version}\n"


@pytest.mark.parametrize("typed", ["--help", "--version", "plan -h"])
def test_help_and_version_take_no_torch(typed: str) -> None:
    """Its import takes seconds."""
    command = [sys.executable, "-c", WITHOUT_TORCH, *typed.split()]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout


def test_help_of_each_command_names_its_options() -> None:
    for name, command in COMMANDS.items():
        output = " ".join(good(name, "--help").split())
        assert output.startswith(f"usage: pp-offload {name} [OPTIONS]")
        assert all(text.split()[0] in output for text in command.arguments if text[0] == "-")
        if name == "simulate":
            assert f"{', '.join(DEVICES)}, or a file" in output
            assert f"{', '.join(SCHEDULES)}, or a CSV" in output
    assert ARGUMENTS["--min-numel"]["default"] == OffloadConfig().min_offloaded_tensor_size


MODELS = "helpers.cli_models"
SIMULATE = f"simulate {MODELS}:good --ranks 2"
PLAN = f"plan {MODELS}:good --ranks 2"
DEEP = f"plan {MODELS}:deep --ranks 2 --microbatches 4 --min-numel 1 --length 1024 --gib 0.01"
WRONG = {
    # Before torch is imported
    "simulat": "invalid choice: 'simulat' (choose from ",
    "plan x:y --limi 1": "the following arguments are required: --limit",
    "trace": "the following arguments are required: FILE...",
    "simulate x:y --ranks 0": "Invalid value for --ranks/--pp: found 0, expected an integer of at",
    "simulate x:y --ranks 1.5": "found 1.5, expected an integer of at least 1",
    "simulate x:y --fraction 2": "found 2, expected a finite number of at least 0 and at most 1",
    "simulate x:y --gib nan": "Invalid value for --gib: found nan, expected a finite number",
    # Models
    "simulate": "found neither of module:function and --hf, expected one of the two",
    f"simulate {MODELS}:good --hf x": "found both of module:function and --hf",
    "simulate cli_models": "Invalid value for MODEL: found 'cli_models', expected module:function",
    "simulate ../cli_models:good": "found '../cli_models:good', expected module:function",
    "simulate x:y --host-gib 1e300": "expected a finite number of at least 0 and at most 1048576",
    "simulate no_file:stages": "no module 'no_file' here or installed",
    f"simulate {MODELS}:nothing": "nothing of helpers.cli_models is not there, expected a",
    f"simulate {MODELS}:without_length": "unexpected keyword argument 'length'",
    f"simulate {MODELS}:a_list": "returned a list, expected a function that takes num_st",
    f"simulate {MODELS}:too_few": "returned 3 stages, expected num_stages: 4",
    f"simulate {MODELS}:on_the_cpu": "weight of stages[0] is on cpu, expected meta",
    f"simulate {MODELS}:unmarked --groups mlp": "found 'mlp', but the model marks",
    f"plan {MODELS}:head_on_the_last --ranks 2 --limit 1GiB": "pattern 'head' matches no",
    f"plan {MODELS}:twice --ranks 2 --limit 1GiB --schedule zbv": "or stage saved as well",
    f"profile {MODELS}:with_lbfgs": "for MODEL or --schedule: the optimizer is LBFGS",
    # Values that need torch or the model
    f"{SIMULATE} --groups moe": "found 'moe', expected some of linear,gelu with commas",
    f"{SIMULATE} --device H10": "found 'H10' (did you mean H100?), expected one of A100, H100",
    f"{SIMULATE} --schedule 1F1B": "(did you mean 1f1b?)",
    f"{SIMULATE} --microbatches 1": "--schedule: Schedule1F1B is no schedule of 2 stages",
    f"{SIMULATE} --trace no_such_folder/out.json": "expected a file in a directory that is there",
    f"{SIMULATE} --plan nowhere.json": "No such file or directory",
    f"{SIMULATE} --optimizer adamw": "found 'adamw' (did you mean AdamW?)",
    f"{SIMULATE} --optimizer Adafactor": "--optimizer: the optimizer is Adafactor, expected one th",
    f"{PLAN} --limit 80": "--limit: limit_bytes is 80, expected at least",
    f"{PLAN} --limit 1Gb": "found '1Gb', expected a number above 0 with a unit of B, kB",
    f"{PLAN} --limit 1GiB -o /nowhere/plan.json": "--output: found /nowhere/plan.json, expected a",
    f"{DEEP} --limit 75MiB --for megatron": "expected names of Megatron",
    f"sweep {MODELS}:good --png front.txt": "front.txt ends otherwise than pictures do",
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
    command = f"{SIMULATE} --hardware {tmp_path / 'out.json'}"
    check_refused(command, "is no file of pp-offload doctor --measure")
    check_refused(command, problem)


def test_errors_of_the_user_keep_their_traceback() -> None:
    with pytest.raises(ValueError, match="what went wrong in my model"):
        run("simulate", f"{MODELS}:broken")
    with pytest.raises(ValueError, match="what went wrong in my optimizer"):
        run(*SIMULATE.split(), "--optimizer", f"{MODELS}:broken_optimizer")


# The doctor: all that a bug report needs, of any machine, and nothing else

GIB = 2**30
TOPICS = ["versions", "device", "host memory", "pinned memory", "disk", "environment"]


def test_every_topic_is_there_and_nobody_is_named() -> None:
    output = good("doctor")
    assert [line for line in output.splitlines() if line and line[0] != " "] == TOPICS
    assert "not known" not in output, "on a machine of ours"
    assert socket.gethostname() not in output and str(Path.home()) not in output


def test_json_has_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    for name in set(doctor.VARIABLES) - {"WORLD_SIZE", "CUDA_LAUNCH_BLOCKING"}:
        monkeypatch.delenv(name, raising=False)
    facts = json.loads(good("doctor", "--json"))
    assert list(facts) == TOPICS
    assert facts["environment"] == {"CUDA_LAUNCH_BLOCKING": "1", "WORLD_SIZE": "4"}
    assert facts["host memory"]["ranks on this host"] == "4"
    budget, _, _ = facts["host memory"]["host budget of a rank"].partition(" GiB")
    assert float(budget) == pytest.approx(HostBudget().limit_bytes / GIB, rel=0.2)


def test_cgroups_of_both_versions_and_what_cannot_be_found(tmp_path: Path) -> None:
    """As on a system without /proc/meminfo, and a directory that is gone."""
    files = {
        "proc/self/cgroup": "0::/job\n4:cpu:/other\n5:memory,hugetlb:/job\n",
        "sys/fs/cgroup/job/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/job/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{GIB}\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    facts = doctor.facts_of(tmp_path / "gone", root=tmp_path)
    of_each = "version 2: 3.00 GiB used of 8.00 GiB", "version 1: 1.00 GiB used of 2.00 GiB"
    assert facts["host memory"]["cgroups"] == "; ".join(of_each)
    assert facts["host memory"]["there is"].startswith("not known: FileNotFoundError")
    assert facts["disk"]["free"].startswith("not known: FileNotFoundError")
    of_none = doctor.facts_of(tmp_path, root=tmp_path / "gone")
    assert of_none["host memory"]["cgroups"] == "no limit"


def test_what_was_measured_is_hardware_of_other_commands(tmp_path: Path) -> None:
    """On the CPU; tests of the emulated device have an accelerator's."""
    out = tmp_path / "out.json"
    good("doctor", "--measure", out, "--measure-mib", 1)
    hardware = Hardware.from_file(out)
    assert hardware.name == "measured cpu"
    assert hardware.pin_bytes_per_s is None and hardware.d2h_slowdown == 0.0
    sizes = "--ranks 2 --microbatches 4 --length 256 --hardware".split()
    output = run("simulate", f"{MODELS}:good", *sizes, out)[1]
    assert "on 2 virtual measured cpu, 1f1b" in output


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_here(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    check_refused(f"doctor --device cuda --measure {out}", "'cuda', with torch ")
    assert not out.exists()
