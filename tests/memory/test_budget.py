"""The budget: what is available, and one count for the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from pp_offload._memory.budget import (
    LOCAL_RANKS,
    SHARE,
    HostBudget,
    as_another_process,
    available_bytes,
    ranks_on_this_host,
    reserved_bytes,
)

KIB = 1024


@pytest.mark.parametrize(
    ("limit", "used", "stat", "expected"),
    [
        ("3000000", "1000000", "", 2000000),
        ("3000000", "1000000", "anon 5\n{}inactive_file 500000\n", 2500000),
        ("max", "1000000", "", 5000 * KIB),
        ("9223372036854771712", "1000000", "", 5000 * KIB),  # what v1 writes for "max"
        ("1000", "5000", "", 0),
    ],
)
@pytest.mark.covering(2)
@pytest.mark.parametrize("group", ["slurm/job", "slurm"], ids=["its own", "above"])
@pytest.mark.parametrize("version", [1, 2])
def test_cgroups(
    tmp_path: Path, limit: str, used: str, stat: str, expected: int, group: str, version: int
) -> None:
    names = "memory.limit_in_bytes", "memory.usage_in_bytes"
    names = names if version == 1 else ("memory.max", "memory.current")
    folder = f"sys/fs/cgroup/{'memory/' if version == 1 else ''}{group}"
    files = {
        "proc/meminfo": "MemTotal:  9000 kB\nMemAvailable:    5000 kB\n",
        "proc/self/cgroup": f"5:devices:/x\n{'4:memory' if version == 1 else '0:'}:/slurm/job\n",
        f"{folder}/{names[0]}": limit,
        f"{folder}/{names[1]}": used,
        f"{folder}/memory.stat": stat.format("total_" if version == 1 else ""),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_bytes(tmp_path) == expected


def test_without_proc_it_is_the_physical_memory(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) > 2**20


def test_budgets_of_a_process_share_one_count() -> None:
    """Budgets of another process have a count of their own."""
    here = HostBudget(reserved_bytes() + 100)
    with as_another_process():
        there, beside = HostBudget(100), HostBudget(100)
    first, other = there.reserve(60), here.reserve(70)
    assert here.left_bytes == 30 and there.left_bytes == beside.left_bytes == 40
    assert beside.but_for(2).left_bytes == 0
    with pytest.raises(MemoryError, match="41 more bytes .* over the budget .*: 40 of 100"):
        beside.reserve(41)
    del first, other
    assert here.left_bytes == beside.left_bytes == 100


def test_the_default_is_this_ranks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pp_offload._memory.budget.available_bytes", lambda: 10**9)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert ranks_on_this_host() == 4
    assert HostBudget().left_bytes == int(10**9 * SHARE) // 4


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "16"}, 4),
        ({"LOCAL_WORLD_SIZE": "", "SLURM_NTASKS_PER_NODE": "8(x2)"}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "WORLD_SIZE": "16"}, 2),
        ({"WORLD_SIZE": "16"}, 16),
        ({"LOCAL_WORLD_SIZE": "all"}, 1),
    ],
)
def test_launchers_say_how_many_ranks_share_the_host(
    variables: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ranks_on_this_host() == expected
