"""What there is to know of this machine for offload. Whatever cannot be found says why.

for topic, facts in facts_of(Path("/scratch"), disk_bytes=2**26).items():
    for name, value in facts.items():
        ...
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch

from pp_offload import __version__
from pp_offload._memory.budget import (
    LOCAL_RANKS,
    SHARE,
    HostBudget,
    available_bytes,
    ranks_on_this_host,
)
from pp_offload._memory.checksum import checksum_version
from pp_offload._memory.disk_file import file_system_of
from pp_offload.backends import default_backend
from pp_offload.cli.disk_speed import disk_speed

MIB, GIB, GB = 2**20, 2**30, 10**9

VARIABLES = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "RANK",
    "LOCAL_RANK",
    *LOCAL_RANKS,
)
"""They change how memory is given out, how copies overlap, or how the budget is divided."""

PINNED_TRIAL_BYTES = MIB

Facts = dict[str, str]


def facts_of(directory: Path, disk_bytes: int, root: Path = Path("/")) -> dict[str, Facts]:
    """All of them, by topic.

    Args:
        directory: Whose disk is tried.
        disk_bytes: That are written to it and read; 0 for none.
        root: Where ``proc`` and ``sys`` are.
    """
    return {
        "versions": _versions(),
        "device": _device(),
        "host memory": _host_memory(root),
        "pinned memory": _pinned(),
        "NUMA": _numa(root),
        "disk": _disk(directory, disk_bytes),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ}
        or {"of those that matter": "none is set"},
    }


def _asked(ask: Callable[[], object]) -> str:
    """The answer, or why there is none: a report that fails helps nobody."""
    try:
        return str(ask())
    except Exception as failure:
        lines = str(failure).splitlines()
        return f"not known: {type(failure).__name__}" + (f": {lines[0]}" if lines else "")


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.2f} GiB"


def _versions() -> Facts:
    builds = {"CUDA": torch.version.cuda, "HIP": torch.version.hip}
    built = [f"{name} {found}" for name, found in builds.items() if found]
    return {
        "pp_offload": __version__,
        "torch": f"{torch.__version__}, built for {' and '.join(built) or 'the CPU'}",
        "Python": platform.python_version(),
        "numpy": numpy.__version__,
        "xxhash": checksum_version(),
        "system": _asked(lambda: f"{platform.system()} {platform.release()} {platform.machine()}"),
    }


def _device() -> Facts:
    facts = {"engine's backend": _asked(lambda: default_backend().name)}
    if not torch.accelerator.is_available():
        return facts | {"accelerator": "none that torch.accelerator finds"}
    for index in range(torch.accelerator.device_count()):
        facts[f"accelerator {index}"] = _asked(partial(_accelerator, index))
    return facts


def _accelerator(index: int) -> str:
    current: Any = torch.accelerator.current_accelerator()
    module: Any = torch.get_device_module(current)
    free, total = module.mem_get_info(index)
    return f"{module.get_device_name(index)}, {_gib(free)} of {_gib(total)} free"


def _host_memory(root: Path) -> Facts:
    return {
        "there is": _asked(lambda: _of_meminfo(root, "MemTotal")),
        "available": _asked(lambda: _gib(available_bytes(root))),
        "cgroup": _asked(lambda: "; ".join(_cgroups(root)) or "no limit found"),
        "ranks on this host": _asked(ranks_on_this_host),
        "host budget of a rank": _asked(
            lambda: f"{_gib(HostBudget().limit_bytes)}, {SHARE:.0%} of what is available / ranks"
        ),
        "cores": _asked(_cores),
    }


def _of_meminfo(root: Path, name: str) -> str:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return _gib(int(line.split()[1]) * 1024)
    raise LookupError(f"{name} is not in meminfo")


def _cores() -> str:
    mine = len(os.sched_getaffinity(0))
    return f"{mine} of {os.cpu_count()} for this process"


def _cgroups(root: Path) -> Iterator[str]:
    """Limits of version 2 and 1, where this process sees its own."""
    base = root / "sys/fs/cgroup"
    kinds = (
        ("version 2", base, "memory.max", "memory.current"),
        ("version 1", base / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    )
    members = dict(_memberships(root))
    for version, folder, limit_name, used_name in kinds:
        for place in dict.fromkeys((folder / members.get(version, ""), folder)):
            if (place / limit_name).is_file():
                limit = (place / limit_name).read_text().strip()
                used = int((place / used_name).read_text())
                has_limit = limit.isdigit() and int(limit) < 2**60
                of = _gib(int(limit)) if has_limit else "no limit"
                yield f"{version}: {_gib(used)} used of {of}"
                break


def _memberships(root: Path) -> Iterator[tuple[str, str]]:
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield "version 2", path.strip("/")
        elif "memory" in controllers.split(","):
            yield "version 1", path.strip("/")


def _pinned() -> Facts:
    return {
        "limit (ulimit -l)": _asked(_memlock),
        f"pinning {PINNED_TRIAL_BYTES // MIB} MiB": _asked(_pin),
    }


def _memlock() -> str:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    soft, hard = (
        "unlimited" if one == resource.RLIM_INFINITY else f"{one / MIB:.1f} MiB" for one in limits
    )
    return f"{soft}, at most {hard}"


def _pin() -> str:
    if not torch.accelerator.is_available():
        return "not tried: memory is pinned for an accelerator, and there is none"
    pinned = torch.empty(PINNED_TRIAL_BYTES, dtype=torch.uint8, device="cpu").pin_memory()
    return "works" if pinned.is_pinned() else "gave memory that is not pinned"


def _numa(root: Path) -> Facts:
    folder = root / "sys/devices/system/node"
    try:
        nodes = sorted(folder.glob("node[0-9]*"), key=lambda one: int(one.name[4:]))
    except (OSError, ValueError) as failure:
        return {"nodes": f"not known: {failure}"}
    if not nodes:
        return {"nodes": "not known: the system has no list of them"}
    return {node.name: _asked(partial(_node, node)) for node in nodes}


def _node(node: Path) -> str:
    cores = (node / "cpulist").read_text().strip() or "none"
    total = next(line for line in (node / "meminfo").read_text().splitlines() if "MemTotal" in line)
    return f"cores {cores}, {_gib(int(total.split()[-2]) * 1024)}"


def _disk(directory: Path, nbytes: int) -> Facts:
    facts = {
        "file system": _asked(lambda: file_system_of(directory)),
        "free": _asked(lambda: _gib(_free(directory))),
    }
    if nbytes == 0:
        return facts | {"speed": "not tried"}
    return facts | {f"speed, {nbytes // MIB} MiB": _asked(lambda: _speed(directory, nbytes))}


def _free(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def _speed(directory: Path, nbytes: int) -> str:
    if _free(directory) < 2 * nbytes:
        return "not tried: less than twice as much is free"
    found = disk_speed(directory, nbytes)
    write, read = found.write_bytes_per_s / GB, found.read_bytes_per_s / GB
    return f"write {write:.2f} GB/s with fsync, read {read:.2f} GB/s"
