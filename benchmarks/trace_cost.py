"""What a trace costs: steps with one and without, in turns in one process.

A block is one of a GPT, its attention and its MLP are groups, and every tensor that they save
leaves. The recording of a step begins before the clock and ends behind it: what is timed is the
step, not the file. The least of many steps is what the program takes where nobody disturbs it. On a
machine that others use the median says more, of the ratios of two steps one after the other. The
time of the thread itself does not count what others take.

    python benchmarks/trace_cost.py --json trace_cost.json
    python benchmarks/trace_cost.py --device emulated

Figures, by size of a block
    ratio          of a step with a trace and without: of the least ones, and the median
    ratio_thread   the same in seconds of the thread that trains
    us_per_event   of that thread, for each thing noted
    num_events     noted in a step
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from operator import truediv
from pathlib import Path
from typing import Any

import torch
from machine import DEVICES, device_of, machine, synchronize
from torch import Tensor, nn

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, PipelineOffloadManager, use_backend
from pp_offload.backends import default_backend
from pp_offload.trace.notes import Room
from pp_offload.trace.recorder import Recorder

SIZES = {"small": (64, 32), "middle": (256, 64), "large": (512, 64)}
"""Width and length of a sequence."""

NUM_BLOCKS, NUM_HEADS, NUM_MICROBATCHES, IN_FLIGHT = 3, 4, 4, 2
NUM_FIRST = 3
"""Steps that teach the plan, and choose bounds."""


class Block(nn.Module):
    """A GPT block in two parts, each a group."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.part("mlp", self.part("attn", x, self.attention), self.mlp)

    def part(self, name: str, x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        with off_interface(True, x, name) as x:
            y = compute(x)
        return off_interface.group_commit(y, name=name)

    def attention(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.proj(y.transpose(1, 2).reshape(batch, length, hidden))

    def mlp(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Steps:
    """Steps of one model.

    Args:
        manager: Offloads.
        size: One of :data:`SIZES`.
    """

    def __init__(self, manager: PipelineOffloadManager, size: str) -> None:
        width, length = SIZES[size]
        self._manager = manager
        self._device = manager.backend.device
        with torch.device(self._device):
            self._model = nn.Sequential(*(Block(width, NUM_HEADS) for _ in range(NUM_BLOCKS)))
            self._inputs = [torch.randn(2, length, width) for _ in range(NUM_MICROBATCHES)]
        self.num_events = 0
        for _ in range(NUM_FIRST):
            self.run()

    def run(self) -> None:
        """One, in 1F1B order."""
        off_interface.reset()
        waiting: list[Tensor] = []
        for x in self._inputs:
            off_interface.init_chunk_handler(None, None, 1)
            waiting.append(self._model(x).square().mean())
            if len(waiting) >= IN_FLIGHT:
                waiting.pop(0).backward()
        while waiting:
            waiting.pop(0).backward()
        self._model.zero_grad()

    def timed(self, *, is_traced: bool) -> tuple[float, float]:
        """Seconds of the wall clock, and of this thread."""
        recorder = Recorder(self._manager.offloader, Room(10**6))
        synchronize(self._device)
        if is_traced:
            recorder.begin()
        begin_s, thread_s = time.perf_counter(), time.thread_time()
        self.run()
        thread_s = time.thread_time() - thread_s  # what waits for the device takes none
        synchronize(self._device)
        wall_s = time.perf_counter() - begin_s
        if is_traced:
            recorder.end()
            assert recorder.notes is not None
            notes = recorder.notes
            samples = sum(len(one.nbytes) for one in recorder.samples)
            marks = len(recorder.marks) - 1
            self.num_events = len(notes.copies) + len(notes.wait_notes) + marks + samples
        return wall_s, thread_s


def measure(size: str, device: torch.device, rounds: int) -> dict[str, Any]:
    """In turns, each first as often."""
    config = OffloadConfig(device_limit_bytes=None, min_offloaded_tensor_size=1)
    off: list[tuple[float, float]] = []
    on: list[tuple[float, float]] = []
    torch.manual_seed(0)
    with use_backend(default_backend(device), config=config) as manager:
        steps = Steps(manager, size)
        for number in range(rounds):
            for is_traced in (number % 2 == 0, number % 2 == 1):
                (on if is_traced else off).append(steps.timed(is_traced=is_traced))
        manager.reset()
    walls, threads = ([[one[n] for one in both] for both in (on, off)] for n in (0, 1))
    more_s = min(threads[0]) - min(threads[1])
    return {
        "step_ms": min(walls[1]) * 1e3,
        "ratio": ratios(*walls),
        "ratio_thread": ratios(*threads),
        "num_events": steps.num_events,
        "us_per_event": more_s * 1e6 / steps.num_events,
    }


def ratios(on: list[float], off: list[float]) -> dict[str, float]:
    return {
        "least": min(on) / min(off),
        "median": statistics.median(map(truediv, on, off)),
    }


def table(figures: dict[str, dict[str, Any]]) -> str:
    lines = [
        "        step ms  with a trace: least  median  its thread: least  median  noted  us each"
    ]
    for size, one in figures.items():
        wall, thread = one["ratio"], one["ratio_thread"]
        lines.append(
            f"{size:<6} {one['step_ms']:>8.1f} {wall['least']:>20.3f} {wall['median']:>7.3f} "
            f"{thread['least']:>14.3f} {thread['median']:>7.3f} {one['num_events']:>6} "
            f"{one['us_per_event']:>8.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="a few rounds; they mean nothing")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = device_of(options.device)
    sizes = ["small"] if options.quick else list(SIZES)
    rounds = 4 if options.quick else options.rounds
    figures = {size: measure(size, device, rounds) for size in sizes}
    print(f"{machine(device)}; {rounds} steps of each\n{table(figures)}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
