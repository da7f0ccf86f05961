"""``pp-offload doctor``: all that a bug report needs, of any machine, and nothing else."""

from __future__ import annotations

import getpass
import json
import socket
from pathlib import Path

import pytest
import torch
from helpers.cli import check_refused, good, run

from pp_offload._memory.budget import HostBudget
from pp_offload.cli import doctor
from pp_offload.simulate import Hardware

GIB = 2**30
TOPICS = ["versions", "device", "host memory", "pinned memory", "disk", "environment"]


def test_every_topic_is_there_and_nobody_is_named() -> None:
    output = good("doctor")
    assert [line for line in output.splitlines() if line and line[0] != " "] == TOPICS
    assert "not known" not in output, "on a machine of ours"
    assert socket.gethostname() not in output and str(Path.home()) not in output
    if getpass.getuser() not in ("root", "user"):
        assert getpass.getuser() not in output


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


def test_cgroups_of_both_versions(tmp_path: Path) -> None:
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
    facts = doctor.facts_of(tmp_path, root=tmp_path)["host memory"]["cgroups"]
    of_each = "version 2: 3.00 GiB used of 8.00 GiB", "version 1: 1.00 GiB used of 2.00 GiB"
    assert facts == "; ".join(of_each)


def test_what_cannot_be_found_says_why(tmp_path: Path) -> None:
    """As on a system without /proc and /sys, and a directory that is gone."""
    facts = doctor.facts_of(tmp_path / "gone", root=tmp_path)
    assert facts["host memory"]["there is"].startswith("not known: FileNotFoundError")
    assert facts["host memory"]["cgroups"] == "no limit"
    assert facts["disk"]["free"].startswith("not known: FileNotFoundError")


def test_what_was_measured_is_hardware_of_other_commands(tmp_path: Path) -> None:
    """On the CPU; tests of the emulated device have an accelerator's."""
    out = tmp_path / "out.json"
    good("doctor", "--measure", out, "--measure-mib", 1)
    hardware = Hardware.from_file(out)
    assert hardware.name == "measured cpu"
    assert hardware.pin_bytes_per_s is None and hardware.d2h_slowdown == 0.0
    sizes = "--ranks 2 --microbatches 4 --length 256 --hardware".split()
    output = run("simulate", "helpers.cli_models:good", *sizes, out)[1]
    assert "on 2 virtual measured cpu, 1f1b" in output


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_here(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    check_refused(f"doctor --device cuda --measure {out}", "'cuda', with torch ")
    assert not out.exists()
