"""``pp-offload doctor``: facts of this machine for a bug report, and figures of its device."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from shutil import disk_usage
from statistics import median
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from pp_offload import __version__
from pp_offload._common.text import MIB, size_text
from pp_offload._core.observers import time_of
from pp_offload._memory import budget
from pp_offload._memory.disk_file import file_system_of
from pp_offload.backends import default_backend
from pp_offload.cli.arguments import check_target, errors_of, report, wrong
from pp_offload.simulate import Hardware

VARIABLES = (  # that change memory allocation, the overlap of copies, or the host budget
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
    *("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES"),
    *("HIP_VISIBLE_DEVICES", "OMP_NUM_THREADS", "RANK", "LOCAL_RANK", *budget.LOCAL_RANKS),
)
SUSTAINED_S = 1.0  # time of products before they are timed: clocks fall when a device is hot
NUM_ROUNDS, NUM_COPIES, NUM_LAUNCHES = 5, 8, 200

Pair = tuple[Tensor, Tensor]  # a target and a source
Ask = Callable[[], object]


def doctor(given: Namespace) -> int:
    """Print facts of the machine; with ``--measure`` also measure the device, into a file."""
    check_target("--measure", given.measure)
    device = default_backend().device if given.device is None else _device(given.device)
    if given.measure is not None:
        hardware = DeviceSpeed(device, given.measure_mib * MIB).hardware()
        machine = {"python": platform.python_version(), "torch": torch.__version__}
        machine["date"] = time.strftime("%Y-%m-%d")
        measured = {"machine": machine, "hardware": asdict(hardware)}
        with errors_of("--measure", OSError):
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


def facts_of(directory: Path, root: Path = Path("/")) -> dict[str, dict[str, str]]:
    """Collect facts by topic and name, of ``directory``'s disk, and of proc and sys in ``root``."""
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
    module: Any = torch.get_device_module(torch.accelerator.current_accelerator())
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


class DeviceSpeed:
    """Measurement of a device. On the CPU copies do not run beside compute. A copy has ``nbytes``,
    at least 4 KiB; matrices are at most a quarter as large, on the CPU less.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._device, self._nbytes = device, nbytes
        self._backend = default_backend(device)
        self._is_host = self._backend.is_host
        most = 2**22 if self._is_host else nbytes  # larger products take minutes
        self._width = 2 ** (((min(nbytes, most) // 8).bit_length() - 1) // 2)
        self._matrices = [self._random(self._width, self._width) for _ in range(2)]
        self._product = partial(torch.matmul, *self._matrices)

    def hardware(self) -> Hardware:
        """Measure all figures."""
        begin_s = time.perf_counter()
        hosts = [self._backend.allocate_host(self._nbytes) for _ in range(2)]
        pin_s = time.perf_counter() - begin_s
        workspace_bytes = self._workspace_bytes()
        product_s = self._product_s()
        forward_s, backward_s = self._attention_s()
        options: Any = {"dtype": torch.uint8, "device": self._device}
        devices = [torch.empty(self._nbytes, **options) for _ in range(2)]
        out, back = (hosts[0], devices[0]), (devices[1], hosts[1])
        d2h_slowdown, h2d_slowdown = self._slowdown(out), self._slowdown(back)
        (d2h,), (h2d,), both = (self.copy_rates(way) for way in ([out], [back], [out, back]))
        launch_s, gap_s = self._launch_s(devices[0][:1])
        module: Any = None if self._is_host else torch.get_device_module(self._device)
        name = getattr(module, "get_device_name", lambda device: device.type)(self._device)
        host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Hardware(
            name=f"measured {name}",
            matmul_flops=2 * self._width**3 / product_s,
            matmul_fraction=1.0,
            attention_fraction=min(1.0, product_s / forward_s),  # the same number of operations
            attention_backward_fraction=min(1.0, 2.5 * product_s / backward_s),
            memory_bytes_per_s=2 * self._nbytes / self._seconds(partial(back[0].copy_, out[1])),
            memory_fraction=1.0,
            memory_bytes=self._backend.memory_bytes() or host_bytes,
            link_bytes_per_s=d2h,
            h2d_bytes_per_s=h2d,
            both_links_bytes_per_s=min(both) if self._is_host else sum(both),
            d2h_slowdown=d2h_slowdown,
            h2d_slowdown=h2d_slowdown,
            launch_s=launch_s,
            kernel_gap_s=gap_s,
            copy_latency_s=1 / self.copy_rates([(out[0][:1], out[1][:1])], NUM_LAUNCHES)[0],
            pin_bytes_per_s=None if self._is_host else 2 * self._nbytes / pin_s,
            workspace_bytes=workspace_bytes,
        )

    def copy_rates(self, pairs: Sequence[Pair], num: int = NUM_COPIES) -> list[float]:
        """Measure bytes a second of copies of pairs, each on its own stream: the best of rounds."""
        return max((self._rates(pairs, num) for _ in range(NUM_ROUNDS)), key=sum)

    def _rates(self, pairs: Sequence[Pair], num: int) -> list[float]:
        if self._is_host:
            return [a.nbytes / self._seconds(partial(a.copy_, b), num) for a, b in pairs]
        spans = self._copies(pairs, num)
        torch.accelerator.synchronize()
        milliseconds = [begin.elapsed_time(end) for begin, end in spans]
        return [num * a.nbytes / ms * 1e3 for (a, _), ms in zip(pairs, milliseconds, strict=True)]

    def _copies(self, pairs: Sequence[Pair], num: int) -> list[Any]:
        """Launch copies, and return their begin and end events."""
        spans, streams = [], (self._backend.d2h, self._backend.h2d)
        for (target, source), stream in zip(pairs, streams, strict=False):
            begin = time_of(self._backend, stream)
            self._backend.copy(stream, [target] * num, [source] * num, "")
            spans.append((begin, time_of(self._backend, stream)))
        return spans

    def _seconds(self, work: Callable[[], object], num: int = 1) -> float:
        """Measure the device's time for each of ``num`` calls in a row."""
        begin: Any = time_of(self._backend, self._backend.current_stream())
        for _ in range(num):
            work()
        end = time_of(self._backend, self._backend.current_stream())
        if not self._is_host:
            torch.accelerator.synchronize()
        return max(begin.elapsed_time(end), 1e-3) / 1e3 / num

    def _median_s(self, work: Callable[[], object], num: int = 1) -> float:
        return median(self._seconds(work, num) for _ in range(NUM_ROUNDS))

    def _product_s(self) -> float:
        begin_s = time.perf_counter()
        while time.perf_counter() - begin_s < SUSTAINED_S:
            self._seconds(self._product, NUM_COPIES)
        return self._median_s(self._product, NUM_COPIES)

    def _attention_s(self) -> tuple[float, float]:
        """Measure forward and backward of causal attention."""
        shape = 1, max(1, self._width // 128), self._width, min(self._width, 128)
        q, k, v = (self._random(*shape).requires_grad_() for _ in range(3))
        forward = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        y = forward()
        backward = partial(torch.autograd.grad, y, (q, k, v), torch.ones_like(y), retain_graph=True)
        return self._median_s(forward), self._median_s(backward)

    def _slowdown(self, pair: Pair) -> float:
        """Measure the part of a product's speed lost beside copies."""
        if self._is_host:
            return 0.0
        alone, beside = [], []
        for _ in range(NUM_ROUNDS):
            alone.append(self._seconds(self._product, NUM_COPIES))
            self._copies([pair], NUM_COPIES)  # longer than the same number of products
            beside.append(self._seconds(self._product, NUM_COPIES))
        return max(0.0, 1 - median(alone) / median(beside))

    def _launch_s(self, x: Tensor) -> tuple[float, float]:
        """Measure the time of a small operator on the host, and on the device after it."""
        begin_s = time.perf_counter()
        for _ in range(NUM_LAUNCHES):
            x.zero_()
        launch_s = (time.perf_counter() - begin_s) / NUM_LAUNCHES
        if self._is_host:
            return launch_s, 0.0
        for _ in range(NUM_COPIES):
            self._product()  # until these have run, the host is ahead
        return launch_s, self._seconds(x.zero_, NUM_LAUNCHES)

    def _workspace_bytes(self) -> int:
        """Measure the device memory that libraries take for forward and backward."""
        before = self._backend.allocated()
        x = self._matrices[0].detach().requires_grad_()
        (x @ self._matrices[1]).backward(self._matrices[1])
        x.grad = None
        after = self._backend.allocated()
        return max(0, after.nbytes - before.nbytes) if before and after else 0

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._device).to(torch.bfloat16)
