"""``pp-offload doctor``: all that a bug report needs, of any machine, and nothing else."""

from __future__ import annotations

import getpass
import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pp_offload._memory.budget import HostBudget
from pp_offload._memory.disk_file import file_system_of
from pp_offload.cli import machine
from pp_offload.cli.app import app
from pp_offload.cli.disk_speed import disk_speed
from pp_offload.simulate import Hardware

MIB, GIB = 2**20, 2**30
TOPICS = ["versions", "device", "host memory", "pinned memory", "NUMA", "disk", "environment"]


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["doctor", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_every_topic_is_there(tmp_path: Path) -> None:
    output = run("--disk-dir", str(tmp_path), "--disk-mib", "2")
    assert [line for line in output.splitlines() if line and line[0] != " "] == TOPICS
    assert "not known" not in output, "on a machine of ours"
    assert "speed, 2 MiB" in output and "GB/s with fsync" in output
    assert not list(tmp_path.iterdir()), "it is gone"


def test_it_names_nobody(tmp_path: Path) -> None:
    output = run("--disk-dir", str(tmp_path), "--disk-mib", "0")
    assert str(tmp_path) not in output and socket.gethostname() not in output
    assert str(Path.home()) not in output
    if getpass.getuser() not in ("root", "user"):
        assert getpass.getuser() not in output


def test_json_has_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    for name in set(machine.VARIABLES) - {"WORLD_SIZE", "CUDA_LAUNCH_BLOCKING"}:
        monkeypatch.delenv(name, raising=False)
    found = json.loads(run("--json", "--disk-mib", "0"))
    assert list(found) == TOPICS
    assert found["environment"] == {"CUDA_LAUNCH_BLOCKING": "1", "WORLD_SIZE": "4"}
    assert found["host memory"]["ranks on this host"] == "4"
    budget, _, _ = found["host memory"]["host budget of a rank"].partition(" GiB")
    assert float(budget) == pytest.approx(HostBudget().limit_bytes / GIB, rel=0.2)
    assert found["disk"]["speed"] == "not tried"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_a_cgroup_of_version_2(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job\n",
            "sys/fs/cgroup/job/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/job/memory.current": f"{3 * GIB}\n",
        },
    )
    assert list(machine._cgroups(tmp_path)) == ["version 2: 3.00 GiB used of 8.00 GiB"]


@pytest.mark.parametrize(
    ("limit", "said"), [(2 * GIB, "2.00 GiB"), (9223372036854771712, "no limit")]
)
def test_a_cgroup_of_version_1(limit: int, said: str, tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu:/other\n5:memory,hugetlb:/job\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{limit}\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{GIB}\n",
        },
    )
    assert list(machine._cgroups(tmp_path)) == [f"version 1: 1.00 GiB used of {said}"]


def test_nodes_of_memory(tmp_path: Path) -> None:
    for number in range(11):
        folder = f"sys/devices/system/node/node{number}"
        memory = f"Node {number} MemTotal:       {(number + 1) * 1024 * 1024} kB\n"
        write(tmp_path, {f"{folder}/cpulist": f"{number}\n", f"{folder}/meminfo": memory})
    found = machine._numa(tmp_path)
    assert list(found) == [f"node{number}" for number in range(11)]
    assert found["node10"] == "cores 10, 11.00 GiB"


def test_what_cannot_be_found_says_why(tmp_path: Path) -> None:
    """As on a system without /proc and /sys, and a directory that is gone."""
    found = machine.facts_of(tmp_path / "gone", MIB, root=tmp_path)
    assert found["host memory"]["there is"].startswith("not known: FileNotFoundError")
    assert found["host memory"]["cgroup"].startswith("not known: FileNotFoundError")
    assert found["NUMA"] == {"nodes": "not known: the system has no list of them"}
    assert found["disk"]["free"].startswith("not known: FileNotFoundError")
    assert found["disk"]["speed, 1 MiB"].startswith("not known: FileNotFoundError")


def test_a_full_disk_is_not_filled_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_free", lambda directory: 3 * MIB)
    assert machine._speed(tmp_path, 2 * MIB) == "not tried: less than twice as much is free"
    assert "GB/s" in machine._speed(tmp_path, MIB)


def test_speeds_are_of_all_bytes(tmp_path: Path) -> None:
    found = disk_speed(tmp_path, 3 * MIB)
    assert found.write_bytes_per_s > 0 and found.read_bytes_per_s > 0


def test_the_file_system_is_that_of_the_nearest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("c /mnt/disk xfs rw 0 0\nb /mnt tmpfs rw 0 0\na / ext4 rw 0 0\n")
    assert file_system_of(Path("/mnt/disk/run"), mounts) == "xfs"
    assert file_system_of(Path("/mnt/disks"), mounts) == "tmpfs"
    assert file_system_of(Path("/mnt2"), mounts) == "ext4"


def test_a_directory_that_is_not_there_is_explained() -> None:
    done = CliRunner().invoke(app, ["doctor", "--disk-dir", "/no/such"])
    assert done.exit_code == 2
    assert "found /no/such, expected a directory that is there" in done.output


def test_what_was_measured_is_hardware_of_other_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU; tests of the emulated device have an accelerator's."""
    out = tmp_path / "out.json"
    run("--measure", str(out), "--measure-mib", "1", "--disk-mib", "1")
    hardware = Hardware.from_file(out)
    assert hardware.name == "measured cpu"
    assert hardware.pin_bytes_per_s is None and hardware.d2h_slowdown == 0.0
    assert hardware.disk_write_bytes_per_s != Hardware.disk_write_bytes_per_s
    monkeypatch.chdir(Path(__file__).parent)
    given = "cli_models:good --ranks 2 --microbatches 4 --length 256 --hardware".split()
    done = CliRunner().invoke(app, ["simulate", *given, str(out)])
    assert "on 2 virtual measured cpu, 1f1b" in done.output


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{}", "'hardware'"),
        ('{"hardware": {"nam": "x"}}', "'nam' is no field of Hardware (did you mean name?)"),
        ('{"hardware": {"name": "x"}}', "missing 4 required keyword-only arguments"),
        ("no JSON", "Expecting value"),
    ],
)
def test_a_file_of_something_else_is_explained(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "out.json").write_text(text)
    given = ["simulate", "cli_models:good", "--hardware", str(tmp_path / "out.json")]
    done = CliRunner().invoke(app, given)
    output = " ".join(done.output.replace("│", "").split())
    assert done.exit_code == 2
    assert "is no file of pp-offload doctor --measure" in output and told in output
