"""Cost of the engine per saved tensor, beside what nothing can avoid.

On the CPU with copies done inline, so that no thread hand-off is counted. All variants run the same
graph in one process, in turns; a figure is the least of many rounds. The cost of a variant is its
time minus that of plain autograd. The floor is hooks that do ``empty`` and ``copy_`` both ways.
``save_on_cpu`` copies nothing here, since the tensors are on the CPU already.

The engine is measured twice: *inline*, where each copy is done at once, and *lagging*, where it
sees a copy as done three copies later, as it does on an accelerator.

    python benchmarks/hook_overhead.py --json overhead.json

Figures
    ratio_to_floor          cost of an offloaded tensor / the floor's, by tensors per group
    ratio_to_floor_lagging  the same, lagging
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peers import installed_peers
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from pp_offload import (
    CpuBackend,
    OffloadConfig,
    PipelineOffloadManager,
    use_backend,
)
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface

NUMEL = 1024
"""Elements of a saved tensor: 4 KiB of float32."""

TENSORS_PER_GROUP = (4, 10, 100)
MAX_NUMEL = 2**40
TARGETS = {4: 1.50, 10: 1.25, 100: 0.95}
BEHIND = 3
"""How many copies a lagging backend is behind: one for each of so many groups."""


class LaggingEvent:
    """Has passed when its stream was given ``behind`` more copies, or after a wait for it."""

    __slots__ = ("_number", "_stream")

    def __init__(self, stream: LaggingStream, number: int) -> None:
        self._stream = stream
        self._number = number

    def query(self) -> bool:
        return self._number <= self._stream.num_passed

    def synchronize(self) -> None:
        self._stream.num_passed = max(self._stream.num_passed, self._number)


class LaggingStream:
    """Counts copies, which are done when they are queued."""

    def __init__(self, behind: int) -> None:
        self.num_passed = 0
        self._num_queued = 0
        self._behind = behind

    def queued(self) -> None:
        self._num_queued += 1
        self.num_passed = max(self.num_passed, self._num_queued - self._behind)

    def wait_event(self, event: LaggingEvent) -> None:
        """Nothing to wait for: all that was queued anywhere has been done."""

    def record_event(self) -> LaggingEvent:
        return LaggingEvent(self, self._num_queued)


class LaggingBackend(CpuBackend):
    """A CPU whose copies are done at once and seen as done when ``behind`` more have followed."""

    def __init__(self, *, behind: int) -> None:
        super().__init__()
        self.name = f"cpu, {behind} copies behind"
        self.d2h = LaggingStream(behind)
        self.h2d = LaggingStream(behind)

    def copy(
        self, stream: LaggingStream, targets: list[Tensor], sources: list[Tensor], label: str
    ) -> None:
        torch._foreach_copy_(targets, sources)
        stream.queued()

    def synchronize(self) -> None:
        for stream in (self.d2h, self.h2d):
            stream.record_event().synchronize()


Run = Callable[[Tensor], Tensor]
"""Operations of a group."""


class Variant:
    """A way to save tensors; this one is plain autograd."""

    name = "plain autograd"

    def install(self) -> None:
        """Called before the clock starts."""

    def begin_step(self) -> None:
        """Called before the first microbatch."""

    def begin_microbatch(self) -> None:
        """Called before the forward of each microbatch."""

    def group(self, x: Tensor, run: Run) -> Tensor:
        """Operations that save tensors."""
        return run(x)


class Hooked(Variant):
    """A context manager around each group."""

    def __init__(self, name: str, context: Callable[[], Any]) -> None:
        self.name = name
        self._context = context

    def group(self, x: Tensor, run: Run) -> Tensor:
        with self._context():
            return run(x)


class Engine(Variant):
    """This engine, as a layer uses it, with a manager of its own that learns the plan of one load.

    Args:
        name: In the table.
        behind: Copies count as done when so many have followed; 0 means at once.
    """

    def __init__(self, name: str, *, behind: int = 0) -> None:
        self.name = name
        config = OffloadConfig(device_limit_bytes=None, min_offloaded_tensor_size=1)
        backend = LaggingBackend(behind=behind) if behind else CpuBackend(inline_bytes=MAX_NUMEL)
        with use_backend(backend, config=config) as manager:
            self._manager = manager

    def install(self) -> None:
        PipelineOffloadManager.OFFLOAD_MGR = self._manager

    def check_all_offloaded(self, load: Load) -> None:
        """Raise an error if tensors stay, for then a figure would say nothing."""
        values = torch.ones(NUMEL)
        expected = load.num_tensors * values.nbytes
        for _ in range(3):
            before = self._manager.statistics().bytes_offloaded
            sample_ns(self, load, values)
            moved = self._manager.statistics().bytes_offloaded - before
        if moved != expected:
            raise RuntimeError(f"{moved} bytes were offloaded, expected {expected}, in {load}")

    def begin_step(self) -> None:
        off_interface.reset()

    def begin_microbatch(self) -> None:
        off_interface.init_chunk_handler(None, None, 1)

    def group(self, x: Tensor, run: Run) -> Tensor:
        with off_interface(True, x, "group") as x:
            y = run(x)
        return off_interface.group_commit(y, name="group")


def nothing(x: Tensor) -> Tensor:
    return x.view_as(x)  # saves nothing, but gives markers that are hooks a node


def chain(x: Tensor, num_tensors: int) -> Tensor:
    if num_tensors == 0:
        return nothing(x)
    for _ in range(num_tensors):
        x = torch._C._nn.leaky_relu(x, 0.5)  # saves its input
    return x


def identity(tensor: Tensor) -> Tensor:
    return tensor


def copied(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


PLAIN = Variant()
IDENTITY = Hooked("identity hooks", lambda: saved_tensors_hooks(identity, identity))
FLOOR = Hooked("copying floor", lambda: saved_tensors_hooks(copied, copied))
SAVE_ON_CPU = Hooked("save_on_cpu", save_on_cpu)


@dataclass(frozen=True)
class Load:
    """What one sample runs: some steps, each all forward, then all backward in the same order."""

    steps: int
    microbatches: int
    groups: int
    tensors: int

    @property
    def num_tensors(self) -> int:
        """Saved tensors in all steps."""
        return self.steps * self.microbatches * self.groups * self.tensors


def sample_ns(variant: Variant, load: Load, values: Tensor) -> int:
    """Time of one run of ``load``."""
    seed = torch.ones_like(values)
    run = partial(chain, num_tensors=load.tensors)
    variant.install()
    start = time.perf_counter_ns()
    for _ in range(load.steps):
        variant.begin_step()
        outputs = []
        for _ in range(load.microbatches):
            variant.begin_microbatch()
            x = values.clone().requires_grad_()  # a storage saved twice moves once
            for _ in range(load.groups):
                x = variant.group(x, run)
            outputs.append(variant.group(x, nothing))  # the engine keeps the last group
        for output in outputs:
            torch.autograd.backward(output, seed)
        del x, output, outputs
    return time.perf_counter_ns() - start


Case = tuple[Variant, Load]


def least_ns(cases: Iterable[Case], seconds: float, min_rounds: int) -> dict[Case, int]:
    """The least time of each case; all take turns, for ``seconds`` but ``min_rounds`` at least."""
    cases = list(dict.fromkeys(cases))
    values = torch.ones(NUMEL)
    least = {case: sample_ns(*case, values) for case in cases}
    gc.collect()
    gc.disable()
    try:
        end, rounds = time.perf_counter() + seconds, 0
        while rounds < min_rounds or time.perf_counter() < end:
            for variant, load in cases:
                took = sample_ns(variant, load, values)
                least[variant, load] = min(took, least[variant, load])
            rounds += 1
    finally:
        gc.enable()
    return least


def cost_ns(least: dict[Case, int], variant: Variant, load: Load) -> float:
    """Per saved tensor, beyond plain autograd."""
    return (least[variant, load] - least[PLAIN, load]) / load.num_tensors


def ours_for(load: Load, *, behind: int = 0) -> Engine:
    """This engine, checked to offload every tensor of ``load``."""
    engine = Engine("ours, lagging" if behind else "ours", behind=behind)
    engine.check_all_offloaded(load)
    return engine


def measure(seconds: float, min_rounds: int) -> dict[str, Any]:
    """All figures, printed."""
    loads = {n: Load(1, 1, max(2, 100 // n), n) for n in TENSORS_PER_GROUP}
    peers = [Hooked(name, context) for name, context in installed_peers(NUMEL)]
    variants = {
        variant.name: dict.fromkeys(loads, variant)
        for variant in (PLAIN, IDENTITY, FLOOR, SAVE_ON_CPU, *peers)
    }
    for name, behind in (("ours", 0), ("ours, lagging", BEHIND)):
        variants[name] = {n: ours_for(load, behind=behind) for n, load in loads.items()}
    cases = [(variants[name][n], load) for n, load in loads.items() for name in variants]
    least = least_ns(cases, seconds, min_rounds)
    costs = {
        name: {n: cost_ns(least, by_size[n], load) for n, load in loads.items()}
        for name, by_size in variants.items()
        if name != PLAIN.name
    }
    floor = costs[FLOOR.name]
    print("\ncost per saved tensor of 4 KiB beyond plain autograd, in us, and over the floor")
    print(f"  {'tensors per group':24}" + "".join(f"{n:>17}" for n in loads))
    for name, by_size in costs.items():
        cells = (f"{ns / 1e3:9.2f} ({ns / floor[n]:5.2f})" for n, ns in by_size.items())
        print(f"  {name:24}" + "".join(cells))
    print(f"  {'target for ours':24}" + "".join(f"{'(':>11}{TARGETS[n]:5.2f})" for n in loads))
    ratios = {
        name: {str(n): costs[name][n] / floor[n] for n in loads}
        for name in ("ours", "ours, lagging")
    }
    return {
        "torch": torch.__version__,
        "ratio_to_floor": ratios["ours"],
        "ratio_to_floor_lagging": ratios["ours, lagging"],
        "cost_ns": costs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of the engine's hooks.")
    parser.add_argument("--seconds", type=float, default=40.0, help="for all")
    parser.add_argument("--quick", action="store_true", help="one round; the figures mean nothing")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seconds, min_rounds = (0.0, 1) if options.quick else (options.seconds, 5)
    try:
        figures = measure(seconds, min_rounds)
    finally:
        PipelineOffloadManager.reset_instance()
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
