"""What a training step costs with and without offload, on one device.

A 1F1B stage is emulated: ``--in-flight`` microbatches go forward, then backward and forward take
turns, and at the end the rest goes backward. The variants run in turns in one process, so that a
drift of the machine meets all of them.

    python benchmarks/step_time.py --in-flight 8 --layers 4 --hidden 4096 --json steps.json

The ceiling is a memcpy of pinned memory on two streams, both ways at once, in the same run. A
variant's own bandwidth is its bytes over the step's time: a share of the ceiling, not of the time
in which a copy ran, so it is a lower bound. ``-`` stands for what this device cannot tell.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peers import installed_peers
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, PipelineOffloadManager, use_backend
from pp_offload.backends import default_backend

MIB = 2**20


class Block(nn.Module):
    """A GPT block in two parts, each a group if ``is_offloaded``."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.is_offloaded = False
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.part("mlp", self.part("attn", x, self.attention), self.mlp)

    def part(self, name: str, x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        with off_interface(self.is_offloaded, x, name) as x:
            y = compute(x)
        return off_interface.group_commit(y, name=name) if self.is_offloaded else y

    def attention(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.proj(y.transpose(1, 2).reshape(batch, length, hidden))

    def mlp(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Variant:
    """Plain training. Others change how a microbatch goes forward."""

    name = "none"

    def begin_step(self) -> None:
        """Before the first microbatch."""

    def forward(self, model: nn.Sequential, x: Tensor) -> Tensor:
        return model(x)

    def moved_bytes(self) -> tuple[int, int] | None:
        """To the host and to the device so far, if known."""
        return None


class InContext(Variant):
    """Saved tensors are handled by a context manager around the forward."""

    def __init__(self, name: str, context: Callable[[], AbstractContextManager[Any]]) -> None:
        self.name = name
        self._context = context

    def forward(self, model: nn.Sequential, x: Tensor) -> Tensor:
        with self._context():
            return model(x)


class Checkpointed(Variant):
    """Every block is recomputed in backward."""

    name = "checkpoint"

    def forward(self, model: nn.Sequential, x: Tensor) -> Tensor:
        for block in model:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Engine(Variant):
    """Ours: the attention and the MLP of each block are groups."""

    name = "ours"

    def __init__(self, manager: PipelineOffloadManager, min_numel: int) -> None:
        self.manager = manager
        self._min_numel = min_numel

    def begin_step(self) -> None:
        off_interface.reset()

    def forward(self, model: nn.Sequential, x: Tensor) -> Tensor:
        off_interface.init_chunk_handler(None, None, self._min_numel)
        for block in model:
            block.is_offloaded = True
        try:
            return model(x)
        finally:
            for block in model:
                block.is_offloaded = False

    def moved_bytes(self) -> tuple[int, int]:
        moved = self.manager.statistics()
        return moved.bytes_offloaded, moved.bytes_reloaded


@dataclass
class Figures:
    """Of one variant; None is what the device cannot tell."""

    step_ms: float
    """Median."""

    step_ms_least: float
    ratio_to_none: float
    """Of the medians."""

    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    offloaded_bytes: int | None
    """To the host, per step."""

    d2h_bytes_per_s: float | None
    h2d_bytes_per_s: float | None


class Samples:
    """What was seen of one variant."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.times: list[float] = []
        self.moved: tuple[int, int] | None = None
        self.allocated: int | None = None
        self.reserved: int | None = None

    def take(self, run: Callable[[Variant], None], device: torch.device) -> None:
        """One step."""
        before = self.variant.moved_bytes()
        reset_peak(device)
        synchronize(device)
        start = time.perf_counter()
        run(self.variant)
        synchronize(device)
        self.times.append(time.perf_counter() - start)
        self.allocated, self.reserved = peak_bytes(device)
        after = self.variant.moved_bytes()
        if before is not None and after is not None:
            self.moved = after[0] - before[0], after[1] - before[1]

    def figures(self, none_s: float) -> Figures:
        median = statistics.median(self.times)
        d2h, h2d = self.moved or (None, None)
        return Figures(
            median * 1e3,
            min(self.times) * 1e3,
            median / none_s,
            self.allocated,
            self.reserved,
            d2h,
            None if d2h is None else d2h / median,
            None if h2d is None else h2d / median,
        )


def step(variant: Variant, model: nn.Sequential, inputs: list[Tensor], in_flight: int) -> None:
    """One step in 1F1B order."""
    variant.begin_step()
    waiting: list[Tensor] = []
    for x in inputs:
        waiting.append(variant.forward(model, x).float().square().mean())
        if len(waiting) >= in_flight:
            waiting.pop(0).backward()
    while waiting:
        waiting.pop(0).backward()
    model.zero_grad()


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def memory_api(device: torch.device) -> Any:
    """Where this device tells of its memory, if it does."""
    if device.type == "cpu":
        return None
    if hasattr(torch.accelerator, "max_memory_allocated"):
        return torch.accelerator
    module = torch.get_device_module(device)
    return module if hasattr(module, "max_memory_allocated") else None


def reset_peak(device: torch.device) -> None:
    api = memory_api(device)
    if api is not None:
        api.reset_peak_memory_stats()


def peak_bytes(device: torch.device) -> tuple[int | None, int | None]:
    """Allocated and reserved, since the last reset."""
    api = memory_api(device)
    if api is None:
        return None, None
    return api.max_memory_allocated(), api.max_memory_reserved()


def ceiling_bytes_per_s(device: torch.device, nbytes: int, repeats: int = 8) -> tuple[float, float]:
    """To the host and to the device, both at once, each on its stream, in the best of five runs.

    On the CPU both are one plain copy at a time.
    """
    pinned = device.type != "cpu"
    hosts = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    devices = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    pairs = [(hosts[0], devices[0]), (devices[1], hosts[1])]
    if not pinned:
        rates = [_host_rate(target, source, repeats) for target, source in pairs]
        return rates[0], rates[1]
    best = [0.0, 0.0]
    for _ in range(5):
        rates = _two_stream_rates(pairs, device, repeats)
        best = [max(old, new) for old, new in zip(best, rates, strict=True)]
    return best[0], best[1]


def _host_rate(target: Tensor, source: Tensor, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return target.nbytes / min(times)


def _two_stream_rates(
    pairs: list[tuple[Tensor, Tensor]], device: torch.device, repeats: int
) -> list[float]:
    streams = [torch.Stream(device=device) for _ in pairs]
    events = [[torch.Event(device=device, enable_timing=True) for _ in range(2)] for _ in pairs]
    synchronize(device)
    for stream, event in zip(streams, events, strict=True):
        event[0].record(stream)
    for _ in range(repeats):
        for stream, (target, source) in zip(streams, pairs, strict=True):
            with stream:
                target.copy_(source, non_blocking=True)
    for stream, event in zip(streams, events, strict=True):
        event[1].record(stream)
    synchronize(device)
    return [
        repeats * target.nbytes / (event[0].elapsed_time(event[1]) / 1e3)
        for event, (target, _) in zip(events, pairs, strict=True)
    ]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    backend = default_backend()
    device = backend.device
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    with torch.device(device):
        blocks = (Block(options.hidden, options.heads) for _ in range(options.layers))
        model = nn.Sequential(*blocks).to(dtype)
        shape = options.batch, options.length, options.hidden
        inputs = [torch.randn(shape, dtype=dtype) for _ in range(options.microbatches)]
    ceiling = ceiling_bytes_per_s(device, options.ceiling_mib * MIB)
    config = OffloadConfig(
        device_limit_bytes=None,
        min_offloaded_tensor_size=options.min_numel,
        activation_offload_fraction=options.fraction,
    )
    with use_backend(backend, config=config) as manager:
        samples = sampled(variants_for(manager, device, options), model, inputs, options, device)
        manager.reset()
    none_s = statistics.median(samples[0].times)
    return {
        "machine": machine(device),
        "options": {k: str(v) for k, v in vars(options).items() if v is not None},
        "dtype": str(dtype),
        "ceiling_d2h_bytes_per_s": ceiling[0],
        "ceiling_h2d_bytes_per_s": ceiling[1],
        "variants": {s.variant.name: asdict(s.figures(none_s)) for s in samples},
    }


def variants_for(
    manager: PipelineOffloadManager, device: torch.device, options: argparse.Namespace
) -> list[Variant]:
    is_accelerator = device.type != "cpu"
    peers = installed_peers(options.min_numel, use_streams=is_accelerator)
    return [
        Variant(),
        Engine(manager, options.min_numel),
        InContext("save_on_cpu", lambda: save_on_cpu(pin_memory=is_accelerator)),
        Checkpointed(),
        *(InContext(name, context) for name, context in peers),
    ]


def sampled(
    variants: list[Variant],
    model: nn.Sequential,
    inputs: list[Tensor],
    options: argparse.Namespace,
    device: torch.device,
) -> list[Samples]:
    """All variants in turns, after warm-up steps of each."""

    def run(variant: Variant) -> None:
        step(variant, model, inputs, options.in_flight)

    for variant in variants:
        for _ in range(options.warmup):
            run(variant)
    samples = [Samples(variant) for variant in variants]
    for _ in range(options.rounds):
        for one in samples:
            one.take(run, device)
    return samples


def machine(device: torch.device) -> dict[str, str]:
    name = platform.processor() or platform.machine()
    if device.type != "cpu":
        module = torch.get_device_module(device)
        name = module.get_device_name(device) if hasattr(module, "get_device_name") else name
    return {
        "device": f"{device} ({name})",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def table(figures: dict[str, Any]) -> str:
    heads = ("variant", "step ms", "ratio", "peak MiB", "reserved", "offl. MiB", "D2H GB/s", "H2D")
    rows = [heads]
    for name, one in figures["variants"].items():
        rows.append(
            (
                name,
                f"{one['step_ms']:.2f}",
                f"{one['ratio_to_none']:.3f}",
                _cell(one["peak_allocated_bytes"], MIB),
                _cell(one["peak_reserved_bytes"], MIB),
                _cell(one["offloaded_bytes"], MIB),
                _cell(one["d2h_bytes_per_s"], 1e9),
                _cell(one["h2d_bytes_per_s"], 1e9),
            )
        )
    d2h, h2d = figures["ceiling_d2h_bytes_per_s"], figures["ceiling_h2d_bytes_per_s"]
    rows.append(("memcpy ceiling", "", "", "", "", "", _cell(d2h, 1e9), _cell(h2d, 1e9)))
    about = ", ".join(figures["machine"].values())
    lines = (f"{row[0]:16}" + "".join(f"{cell:>11}" for cell in row[1:]) for row in rows)
    return "\n".join((f"{about}, {figures['dtype']}", *lines))


def _cell(value: float | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:.1f}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Step time and memory of a 1F1B emulation.")
    is_accelerated = torch.accelerator.is_available()
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--microbatches", type=int, help="per step; twice --in-flight by default")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=4096 if is_accelerated else 128)
    parser.add_argument("--heads", type=int, help="hidden / 128, at least 2, by default")
    parser.add_argument("--length", type=int, default=4096 if is_accelerated else 128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", help="of torch; bfloat16, on the CPU float32, by default")
    parser.add_argument("--min-numel", type=int, default=2**20 if is_accelerated else 1024)
    parser.add_argument("--fraction", type=float, default=1.0, help="of groups offloaded")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--ceiling-mib", type=int, default=256 if is_accelerated else 64)
    parser.add_argument("--quick", action="store_true", help="a small smoke test")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if options.quick:
        options.in_flight, options.layers, options.hidden, options.length = 2, 2, 32, 16
        options.rounds, options.warmup, options.min_numel, options.ceiling_mib = 1, 1, 1, 1
    options.microbatches = options.microbatches or 2 * options.in_flight
    options.heads = options.heads or max(2, options.hidden // 128)
    return options


def main() -> None:
    options = parse()
    figures = measure(options)
    print(table(figures))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
