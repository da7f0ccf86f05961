"""``pp-offload doctor``: facts of this machine for a bug report. An unknown fact says why."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from shutil import disk_usage
from typing import Any

import numpy
import torch

from pp_offload import __version__
from pp_offload._common.text import MIB, size_text
from pp_offload._memory import budget
from pp_offload._memory.disk_file import file_system_of
from pp_offload.backends import default_backend
from pp_offload.cli.arguments import check_target, report, wrong
from pp_offload.cli.device_speed import DeviceSpeed

VARIABLES = (
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
    *("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES"),
    *("HIP_VISIBLE_DEVICES", "OMP_NUM_THREADS", "RANK", "LOCAL_RANK", *budget.LOCAL_RANKS),
)
"""Variables that change memory allocation, the overlap of copies, or the host budget."""

Ask = Callable[[], object]


def doctor(given: Namespace) -> int:
    """Print facts of the machine; with ``--measure`` also measure the device, into a file."""
    check_target("--measure", given.measure)
    device = default_backend().device if given.device is None else _device(given.device)
    if given.measure is not None:
        measured = _measured(device, given.measure_mib * MIB)
        given.measure.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    facts_by_topic = facts_of(Path(tempfile.gettempdir()))
    lines = []
    for topic, facts in facts_by_topic.items():
        width = max(map(len, facts))
        lines += ["", topic, *(f"  {name.ljust(width)}  {text}" for name, text in facts.items())]
    report("\n".join(lines[1:]), facts_by_topic, as_json=given.json)
    return 0


def _device(name: str) -> torch.device:
    """Return a usable device."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as failure:  # torch's, of a build without CUDA or a GPU
        raise wrong("--device", f"{name!r}, with torch {_torch()}: {failure}") from failure
    return device


def _measured(device: torch.device, nbytes: int) -> dict[str, dict[str, Any]]:
    """Make the contents of a file for ``Hardware.from_file``."""
    hardware = DeviceSpeed(device, nbytes).hardware()
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    machine = {**versions, "date": time.strftime("%Y-%m-%d")}
    return {"machine": machine, "hardware": asdict(hardware)}


def facts_of(directory: Path, root: Path = Path("/")) -> dict[str, dict[str, str]]:
    """Collect facts by topic and name, with those of a directory's disk. ``proc`` and ``sys`` are
    in ``root``.
    """
    variables = {name: partial(os.environ.get, name) for name in VARIABLES if name in os.environ}
    topics: dict[str, Mapping[str, Ask]] = {
        "versions": {
            "pp_offload": lambda: __version__,
            "torch": _torch,
            "Python": platform.python_version,
            "numpy": lambda: numpy.__version__,
            "xxhash": partial(version, "xxhash"),
            "system": lambda: f"{platform.system()} {platform.release()} {platform.machine()}",
        },
        "device": {"engine's backend": lambda: default_backend().name} | _accelerators(),
        "host memory": {
            "there is": lambda: _total(root / "proc/meminfo"),
            "available": lambda: size_text(budget.available_bytes(root)),
            "cgroups": lambda: "; ".join(map(_limit, budget.cgroups(root))) or "no limit",
            "ranks on this host": budget.ranks_on_this_host,
            "host budget of a rank": lambda: size_text(budget.HostBudget().limit_bytes),
            "cores": lambda: f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} for this process",
        },
        "pinned memory": {"pinning 1 MiB": _pin},
        "disk": {
            "file system": lambda: file_system_of(directory),
            "free": lambda: size_text(disk_usage(directory).free),
        },
        "environment": variables or {"of those that matter": lambda: "none is set"},
    }
    return {
        topic: {name: _answer(ask) for name, ask in asks.items()} for topic, asks in topics.items()
    }


def _answer(ask: Ask) -> str:
    """Return the answer, or the reason for none: a report must not fail."""
    try:
        return str(ask())
    except Exception as failure:
        lines = str(failure).splitlines()
        return f"not known: {type(failure).__name__}" + (f": {lines[0]}" if lines else "")


def _torch() -> str:
    builds = {"CUDA": torch.version.cuda, "HIP": torch.version.hip}
    built = " and ".join(f"{name} {version}" for name, version in builds.items() if version)
    return f"{torch.__version__}, built for {built or 'the CPU'}"


def _accelerators() -> dict[str, Ask]:
    if not torch.accelerator.is_available():
        return {"accelerator": lambda: "none that torch.accelerator finds"}
    count = torch.accelerator.device_count()
    return {f"accelerator {index}": partial(_accelerator, index) for index in range(count)}


def _accelerator(index: int) -> str:
    current: Any = torch.accelerator.current_accelerator()
    module: Any = torch.get_device_module(current)
    free, total = module.mem_get_info(index)
    return f"{module.get_device_name(index)}, {size_text(free)} of {size_text(total)} free"


def _total(meminfo: Path) -> str:
    line = next(line for line in meminfo.read_text().splitlines() if "MemTotal" in line)
    return size_text(int(line.split()[-2]) * 1024)


def _limit(cgroup: budget.Cgroup) -> str:
    used, limit = size_text(cgroup.used_bytes), size_text(cgroup.limit_bytes)
    return f"version {cgroup.version}: {used} used of {limit}"


def _pin() -> str:
    if not torch.accelerator.is_available():
        return "not tried: memory is pinned for an accelerator, and there is none"
    is_pinned = torch.empty(MIB, dtype=torch.uint8, device="cpu").pin_memory().is_pinned()
    return "works" if is_pinned else "gave memory that is not pinned"
