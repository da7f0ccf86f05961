"""Steps of a 1F1B stage on a real accelerator: plain, recomputed and offloaded, beside each other.

Microbatches go forward until so many are in flight, then backward and forward take turns. Each way
is warmed up, and then measured in turns with a plain step. A row is printed as soon as it is known,
as one line of JSON: a run that is cut off leaves what it has measured.

    python benchmarks/on_card.py gpt4096 llama8b --ways recompute ours ours-0.5
    PYTHONPATH=/another/checkout python benchmarks/on_card.py gpt4096 --ways ours

The first line has the machine, and GB/s of plain copies to the host and to the device at once.

Figures of a row
    ms, least     median and least time of a step
    ratio         of the medians, to the plain steps in turns with it
    host_ms       until the step was queued, of which the device may have run nothing yet; median
    peak_gib      allocated, and with ``reserved`` what the allocator took, in a step
    moved_gib     to the host and to the device, in a step
    same          whether losses and gradients of a step are those of a plain one, bit for bit
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import machine
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadActivations, OffloadConfig, use_backend
from pp_offload.backends import default_backend

GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A stage, and how its microbatches follow each other."""

    kind: str
    width: int
    inner: int
    heads: int
    kv_heads: int
    length: int
    layers: int
    in_flight: int
    microbatches: int

    @property
    def min_numel(self) -> int:
        """Elements of the smallest tensor that leaves: no statistics of a norm do."""
        return min(2**20, self.length * self.width // 4)


CASES = {
    "gpt4096": Case("gpt", 4096, 16384, 32, 32, 4096, 2, 4, 8),
    "llama8b": Case("llama", 4096, 14336, 32, 8, 8192, 2, 3, 6),
    "small": Case("gpt", 512, 2048, 4, 4, 1024, 12, 4, 8),
    "tiny": Case("llama", 32, 64, 2, 1, 16, 2, 2, 4),
}
LARGE = ("gpt4096", "llama8b")
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "ours": {"device_limit_bytes": None},
    "ours-copied": {"device_limit_bytes": None, "rematerialize": "none"},
    "limit-0.55": {"device_limit_bytes": 0.55},
    "limit-0.7": {"device_limit_bytes": 0.7},
    "limit-0.85": {"device_limit_bytes": 0.85},
    "limit-0.7-copied": {"device_limit_bytes": 0.7, "rematerialize": "none"},
    "ours-0.7": {"activation_offload_fraction": 0.7},
    "ours-0.5": {"activation_offload_fraction": 0.5},
    "ours-8g": {
        "device_limit_bytes": None,
        "max_in_flight_bytes": 8 * GIB,
        "prefetch_bytes": 8 * GIB,
    },
}
"""Groups of attention and of MLP, with these options; limits are parts of a plain step's peak."""
PEERS = {"trl": "trl.models.activation_offloading", "torchtune": "torchtune.training"}
"""Modules with the class ``OffloadActivations``. None is required."""

OTHERS = ("none", "recompute", "activations", "save_on_cpu", *PEERS)
"""Plain; each layer checkpointed; all of the stage in a context of ours, of torch, or of a peer."""


class Layer(nn.Module):
    """Attention and MLP with their norms, no biases; those named in ``groups`` are groups."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.groups: Collection[str] = ()
        self.interface: Any = off_interface
        self.head = case.width // case.heads
        sizes = [(case.width, case.width), (case.width, case.width)]
        sizes += [(case.kv_heads * self.head, case.width)] * 2
        sizes += [(case.inner, case.width)] * (1 if case.kind == "gpt" else 2)
        sizes += [(case.width, case.inner)]
        self.weights = nn.ParameterList(torch.randn(a, b) * (0.5 / b**0.5) for a, b in sizes)
        self.scales = nn.ParameterList(torch.ones(case.width) for _ in range(2))

    def norm(self, x: Tensor, index: int) -> Tensor:
        shape, scale = (x.shape[-1],), self.scales[index]
        return (F.layer_norm if self.case.kind == "gpt" else F.rms_norm)(x, shape, scale)

    def attention(self, x: Tensor) -> Tensor:
        y, (q, o, k, v, *_) = self.norm(x, 0), self.weights
        parts = [
            F.linear(y, weight).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for weight in (q, k, v)
        ]
        repeats = self.case.heads // self.case.kv_heads
        if repeats > 1:
            parts[1:] = [part.repeat_interleave(repeats, 1) for part in parts[1:]]
        y = F.scaled_dot_product_attention(*parts, is_causal=True)
        return x + F.linear(y.transpose(1, 2).flatten(2), o)

    def mlp(self, x: Tensor) -> Tensor:
        y, (*inner, down) = self.norm(x, 1), self.weights[4:]
        if self.case.kind == "gpt":
            return x + F.linear(F.gelu(F.linear(y, inner[0])), down)
        return x + F.linear(F.silu(F.linear(y, inner[0])) * F.linear(y, inner[1]), down)

    def forward(self, x: Tensor) -> Tensor:
        for name, part in (("attn", self.attention), ("mlp", self.mlp)):
            is_group = name in self.groups
            with self.interface(is_group, x, name) as x:
                x = part(x)
            if is_group:
                x = self.interface.group_commit(x, name=name)
        return x


class Stage:
    """The layers, and a step of them.

    Attributes:
        num_chosen: How many layers, from the first on, have groups or are recomputed.
        groups: Names of the parts of such a layer that are groups.
        interface: Marks the groups: this engine's, or that of another module with the same names.
        wait: Called after each forward and each backward.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        torch.manual_seed(0)
        dtype = torch.float32 if device.type in ("cpu", "emulated") else torch.bfloat16
        self.case, self.device = case, device
        with torch.device(device):
            self.layers = [Layer(case).to(dtype) for _ in range(case.layers)]
            shape = 1, case.length, case.width
            self.inputs = [torch.randn(shape, dtype=dtype) for _ in range(case.microbatches)]
        self.losses: list[Tensor] = []
        self.num_chosen = case.layers
        self.groups: Collection[str] = ("attn", "mlp")
        self.interface: Any = off_interface
        self.wait: Callable[[], object] = lambda: None

    def forward(self, x: Tensor, way: str) -> Tensor:
        for number, layer in enumerate(self.layers):
            is_chosen = number < self.num_chosen
            layer.interface = self.interface
            layer.groups = self.groups if is_chosen and way in WAYS else ()
            is_run_again = is_chosen and way == "recompute"
            x = checkpoint(layer, x, use_reentrant=False) if is_run_again else layer(x)
        return x.float().square().mean()

    def step(self, way: str, context: Callable[[], AbstractContextManager[object]]) -> None:
        waiting: list[Tensor] = []
        self.losses = []
        if way in WAYS:
            self.interface.reset()
        for x in self.inputs:
            if way in WAYS:
                self.interface.init_chunk_handler(None, None, self.case.min_numel)
            with context():
                waiting.append(self.forward(x, way))
            self.wait()
            self.losses.append(waiting[-1].detach())
            if len(waiting) >= self.case.in_flight:
                waiting.pop(0).backward()
                self.wait()
        while waiting:
            waiting.pop(0).backward()
            self.wait()

    def same(self, way: str, context: Callable[[], AbstractContextManager[object]]) -> bool:
        """Whether a step gives the same bits as a plain one.

        Attention's backward is not the same twice unless it is told to.
        """
        torch.use_deterministic_algorithms(True)
        results = []
        for each in (("none", nullcontext), (way, context)):
            self.step(*each)
            weights = [weight for layer in self.layers for weight in layer.parameters()]
            results.append([*self.losses, *(weight.grad for weight in weights)])
            self.clear()
        torch.use_deterministic_algorithms(False)
        return all(map(torch.equal, *results))

    def clear(self) -> None:
        for layer in self.layers:
            layer.zero_grad()


def plain_peak(case: Case, device: torch.device) -> int | None:
    """Bytes of a step without offload, where the device tells."""
    stage = Stage(case, device)
    for _ in range(2):
        machine.reset_peak(device)
        stage.step("none", nullcontext)
        machine.synchronize(device)
        stage.clear()
    return machine.peak_bytes(device)[0]


def peer(module: str, min_numel: int, *, overlaps: bool) -> Callable[[], Any] | None:
    """Make the context of another offloader; None if it does not run here.

    Tensors of ``min_numel`` elements leave. Copies overlap compute only on an accelerator.
    """
    options = {"use_pin_memory": overlaps, "use_streams": overlaps, "min_offload_size": min_numel}
    try:
        context = partial(importlib.import_module(module).OffloadActivations, **options)
        with context():
            torch.ones(1024, requires_grad=True).sin().cos().sum().backward()
    except Exception:
        return None
    return context


def gib(nbytes: int | None) -> float | None:
    return None if nbytes is None else round(nbytes / GIB, 5)


def measure(case: str, way: str, device: torch.device, rounds: int, warmup: int) -> dict[str, Any]:
    """A row."""
    times: dict[str, list[tuple[float, float]]] = {"none": [], way: []}
    row: dict[str, Any] = {"case": case, "way": way}
    options = dict(WAYS.get(way, {}))
    if isinstance(part := options.get("device_limit_bytes"), float):
        peak = plain_peak(CASES[case], device)
        options["device_limit_bytes"] = peak and int(part * peak)
        row["limit_gib"] = gib(options["device_limit_bytes"])
    with ExitStack() as stack:
        config = OffloadConfig(min_offloaded_tensor_size=CASES[case].min_numel, **options)
        manager = stack.enter_context(use_backend(default_backend(device), config=config))
        context: Any = nullcontext
        if way == "activations":
            offload = OffloadActivations(
                min_offload_size=CASES[case].min_numel,
                config=OffloadConfig(device_limit_bytes=None),
            )
            context = lambda: offload  # noqa: E731
        elif way == "save_on_cpu":
            context = partial(save_on_cpu, pin_memory=device.type != "cpu")
        elif way in PEERS:
            context = peer(PEERS[way], CASES[case].min_numel, overlaps=device.type != "cpu")
            if context is None:
                return {**row, "left_out": "it is not installed, or does not run here"}
        stage = Stage(CASES[case], device)

        def step(name: str) -> None:
            before = manager.statistics()
            machine.synchronize(device)
            machine.reset_peak(device)
            start = time.perf_counter()
            stage.step(name, context if name == way else nullcontext)
            queued = time.perf_counter()
            machine.synchronize(device)
            times[name].append((time.perf_counter() - start, queued - start))
            if name == way:
                row["peak_gib"], row["reserved_gib"] = map(gib, machine.peak_bytes(device))
            if name == way and way in WAYS:
                moved = manager.statistics().since(before)
                row["moved_gib"] = [gib(moved.bytes_offloaded), gib(moved.bytes_reloaded)]
            stage.clear()

        start = time.perf_counter()
        row["same"] = stage.same(way, context)
        for _ in range(warmup):
            step(way)
        row["warmup_s"] = round(time.perf_counter() - start, 2)
        row["same"] &= stage.same(way, context)
        times = {"none": [], way: []}
        machine.empty_cache(device)
        for _ in range(rounds):
            step("none")
            step(way)
    medians = {name: statistics.median(t for t, _ in some) for name, some in times.items()}
    row["ms"] = round(medians[way] * 1e3, 2)
    row["least"] = round(min(t for t, _ in times[way]) * 1e3, 2)
    row["ratio"] = round(medians[way] / medians["none"], 4)
    row["host_ms"] = round(statistics.median(t for _, t in times[way]) * 1e3, 1)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", choices=[*CASES, []])
    parser.add_argument("--ways", nargs="+", choices=[*OTHERS, *WAYS], default=[*OTHERS, *WAYS])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=6, help="the first ones pin memory and learn")
    parser.add_argument("--device", choices=machine.DEVICES)
    options = parser.parse_args()
    device = default_backend(options.device and machine.device_of(options.device)).device
    link = [round(rate / 1e9, 2) for rate in machine.ceiling_bytes_per_s(device)]
    print(json.dumps({**machine.facts(device), "link_gb_per_s": link}), flush=True)
    for case in options.cases or LARGE:
        for way in options.ways:
            row = measure(case, way, device, options.rounds, options.warmup)
            print(json.dumps(row), flush=True)
            machine.empty_cache(device)


if __name__ == "__main__":
    main()
