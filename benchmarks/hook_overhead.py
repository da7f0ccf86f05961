"""Cost of the engine per saved tensor and per group, beside what nothing can avoid.

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
    passthrough_ratio       cost of a tensor too small to move / that of identity hooks
    passthrough_leaf_ratio  the same for a parameter
    disabled_us             cost of a tensor in a group while offload is disabled
    slope                   cost of an offloaded tensor with 4096 buffers live / with 64
    group_ratio             cost of a group around an operation that saves nothing: start and
                            commit, forward and backward / cost of two identity functions there
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
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
    fine_grained_offloading_group_commit,
    fine_grained_offloading_group_start,
    use_backend,
)
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface

NUMEL = 1024
"""Elements of a saved tensor: 4 KiB of float32."""

TENSORS_PER_GROUP = (4, 10, 100)
MAX_NUMEL = 2**40
WEIGHT = torch.nn.Parameter(torch.ones(NUMEL))
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
        min_numel: Smaller tensors are passed through.
        behind: Copies count as done when so many have followed; 0 means at once.
        is_enabled: Whether offload is enabled.
    """

    def __init__(
        self, name: str, min_numel: int, *, behind: int = 0, is_enabled: bool = True
    ) -> None:
        self.name = name
        self._min_numel = min_numel
        config = OffloadConfig(device_limit_bytes=None, min_offloaded_tensor_size=1)
        backend = LaggingBackend(behind=behind) if behind else CpuBackend(inline_bytes=MAX_NUMEL)
        with use_backend(backend, config=config) as manager:
            self._manager = manager
        if not is_enabled:
            manager.disable_offload()

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
        off_interface.init_chunk_handler(None, None, self._min_numel)

    def group(self, x: Tensor, run: Run) -> Tensor:
        with off_interface(True, x, "group") as x:
            y = run(x)
        return off_interface.group_commit(y, name="group")


class Markers(Engine):
    """The functions for start and commit, and no hooks."""

    def group(self, x: Tensor, run: Run) -> Tensor:
        y = run(fine_grained_offloading_group_start(x, "group"))
        return fine_grained_offloading_group_commit(y, "group")


class Identity(torch.autograd.Function):
    """The least an autograd function can do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class TwoIdentities(Variant):
    """An identity function at the start of a group and one at its end."""

    name = "two identity functions"

    def group(self, x: Tensor, run: Run) -> Tensor:
        return Identity.apply(run(Identity.apply(x)))


def nothing(x: Tensor) -> Tensor:
    return x.view_as(x)  # saves nothing, but gives markers that are hooks a node


def chain(x: Tensor, num_tensors: int) -> Tensor:
    if num_tensors == 0:
        return nothing(x)
    for _ in range(num_tensors):
        x = torch._C._nn.leaky_relu(x, 0.5)  # saves its input
    return x


def added(x: Tensor, num_tensors: int) -> Tensor:
    for _ in range(num_tensors):
        x = x + torch._C._nn.leaky_relu(WEIGHT, 0.5)  # saves the parameter
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

    run: Callable[[Tensor, int], Tensor] = chain

    has_margin: bool = True
    """Whether an empty group ends each microbatch: the engine keeps the last one on the device."""

    @property
    def num_tensors(self) -> int:
        """Saved tensors in all steps."""
        return self.steps * self.microbatches * self.groups * self.tensors


def sample_ns(variant: Variant, load: Load, values: Tensor) -> int:
    """Time of one run of ``load``."""
    seed = torch.ones_like(values)
    run = partial(load.run, num_tensors=load.tensors)
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
            outputs.append(variant.group(x, nothing) if load.has_margin else x)
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
    engine = Engine("ours, lagging" if behind else "ours", 1, behind=behind)
    engine.check_all_offloaded(load)
    return engine


def measure(seconds: float, min_rounds: int) -> dict[str, Any]:
    """All figures, printed as they come; each of the parts takes about ``seconds``."""
    figures: dict[str, Any] = {"torch": torch.__version__, "seconds": seconds}
    try:
        for part in (measure_tensors, measure_passthrough, measure_slope, measure_groups):
            figures |= part(seconds, min_rounds)
    finally:
        PipelineOffloadManager.reset_instance()
    return figures


def measure_tensors(seconds: float, min_rounds: int) -> dict[str, Any]:
    """L8: the cost of an offloaded tensor."""
    loads = {n: Load(1, 1, max(2, 100 // n), n) for n in TENSORS_PER_GROUP}
    peers = [Hooked(name, context) for name, context in installed_peers(NUMEL)]
    variants = {
        variant.name: dict.fromkeys(loads, variant)
        for variant in (PLAIN, IDENTITY, FLOOR, SAVE_ON_CPU, *peers)
    }
    for name, behind in (("ours", 0), ("ours, lagging", BEHIND)):
        variants[name] = {n: ours_for(load, behind=behind) for n, load in loads.items()}
    cases = [(variants[name][n], load) for n, load in loads.items() for name in variants]
    least = least_ns(cases, 2 * seconds, min_rounds)
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
        "ratio_to_floor": ratios["ours"],
        "ratio_to_floor_lagging": ratios["ours, lagging"],
        "cost_ns": costs,
    }


def measure_passthrough(seconds: float, min_rounds: int) -> dict[str, Any]:
    """L11: a tensor that stays: an activation, a parameter, or any while offload is disabled."""
    load = Load(1, 1, 2, 100)
    leaf = replace(load, run=added)
    ours = Engine("ours, passed through", MAX_NUMEL)
    disabled = Engine("ours, disabled", 1, is_enabled=False)
    cases = [(variant, each) for each in (load, leaf) for variant in (PLAIN, IDENTITY, ours)]
    least = least_ns([*cases, (disabled, load)], seconds, min_rounds)
    costs = {variant: cost_ns(least, variant, load) for variant in (IDENTITY, ours, disabled)}
    ratio = costs[ours] / costs[IDENTITY]
    leaf_ratio = cost_ns(least, ours, leaf) / cost_ns(least, IDENTITY, leaf)
    print("\ntensor that stays, 100 per group, beyond plain autograd, in us")
    for variant, ns in costs.items():
        print(f"  {variant.name:24}{ns / 1e3:9.2f} us")
    print(f"  activation / identity hooks {ratio:.2f} (target 2.30)")
    print(f"  parameter / identity hooks  {leaf_ratio:.2f} (target 1.60)")
    return {
        "passthrough_ratio": ratio,
        "passthrough_leaf_ratio": leaf_ratio,
        "disabled_us": costs[disabled] / 1e3,
    }


def measure_slope(seconds: float, min_rounds: int) -> dict[str, Any]:
    """L2: the cost with few and with many buffers live. Every sample saves 4096 tensors."""
    loads = {32 * m: Load(128 // m, m, 4, 8) for m in (1, 2, 16, 128)}
    engines = {n: ours_for(load) for n, load in loads.items()}
    cases = [(v, load) for n, load in loads.items() for v in (PLAIN, FLOOR, engines[n])]
    least = least_ns(cases, 2 * seconds, min_rounds)
    ours = {n: cost_ns(least, engines[n], load) for n, load in loads.items()}
    floor = {n: cost_ns(least, FLOOR, load) for n, load in loads.items()}
    print("\ncost per saved tensor by live buffers (microbatches of 4 groups of 8 tensors), in us")
    print(f"  {'live buffers':24}" + "".join(f"{n:>9}" for n in loads))
    for name, costs in ((FLOOR.name, floor), ("ours", ours)):
        print(f"  {name:24}" + "".join(f"{ns / 1e3:9.2f}" for ns in costs.values()))
    slope, floor_slope = ours[4096] / ours[64], floor[4096] / floor[64]
    print(f"  slope from 64 to 4096: {slope:.3f} (target 1.050); of the floor: {floor_slope:.3f}")
    return {"slope": slope, "slope_floor": floor_slope, "cost_ns_by_live_buffers": ours}


def measure_groups(seconds: float, min_rounds: int) -> dict[str, Any]:
    """L3: the cost of a group with nothing in it."""
    load = Load(1, 1, 32, 0, has_margin=False)
    markers, two = Markers("start and commit", 1), TwoIdentities()
    engine = Engine("with hooks, and commit", 1)
    variants = (two, markers, engine)
    least = least_ns([(v, load) for v in (PLAIN, *variants)], seconds / 2, min_rounds)
    per_group = {v: (least[v, load] - least[PLAIN, load]) / load.groups for v in variants}
    ratio = per_group[markers] / per_group[two]
    print("\ngroup that saves nothing, forward and backward, beyond plain autograd")
    for variant, ns in per_group.items():
        print(f"  {variant.name:24}{ns / 1e3:9.2f} us ({ns / per_group[two]:5.2f})")
    print(f"  ratio {ratio:.2f} (target 1.60)")
    return {"group_ratio": ratio, "group_ratio_with_hooks": per_group[engine] / per_group[two]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of the engine's hooks and markers.")
    parser.add_argument("--seconds", type=float, default=20.0, help="per part of four")
    parser.add_argument("--quick", action="store_true", help="one round; the figures mean nothing")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seconds, min_rounds = (0.0, 1) if options.quick else (options.seconds, 5)
    figures = measure(seconds, min_rounds)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
