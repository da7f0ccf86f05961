"""What the engine costs per saved tensor and per group, beside what nobody can avoid.

On the CPU with copies done inline, so that no thread hand-off is counted. All variants run the same
graph in one process, in turns; a figure is the least of many rounds. The cost of a variant is its
time minus that of plain autograd. The floor is hooks that do ``empty`` and ``copy_`` both ways.
``save_on_cpu`` copies nothing here, since the tensors are on the CPU already.

Ours is measured twice: *inline*, where each copy is done at once, and *lagging*, where the engine
sees a copy as done three copies later, as it does on an accelerator.

    python benchmarks/hook_overhead.py --json overhead.json

Figures
    ratio_to_floor          cost of an offloaded tensor / the floor's, by tensors per group
    ratio_to_floor_lagging  the same, lagging
    frames_per_tensor       Python functions called for an offloaded tensor, 100 per group
    group_fixed_us          cost of a group that saves something, beyond that of its tensors
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
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lagging import LaggingBackend
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


Run = Callable[[Tensor], Tensor]
"""Operations of a group."""


class Variant:
    """A way to save tensors; this one is plain autograd. Others change what they must."""

    name = "plain autograd"

    def install(self) -> None:
        """Before the clock starts."""

    def begin_step(self) -> None:
        """Before the first microbatch."""

    def begin_microbatch(self) -> None:
        """Before the forward of each microbatch."""

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
    """Ours, as a layer uses it. Tensors of fewer than ``min_numel`` elements are passed through.

    Each has a manager of its own, which learns the plan of one load.

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
        """A figure for tensors that stayed on the device would say nothing."""
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
    """Ours with the functions for start and commit, and no hooks."""

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
Log = Callable[[str], None]


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
    """Ours, checked to offload every tensor of ``load``."""
    engine = Engine("ours, lagging" if behind else "ours", 1, behind=behind)
    engine.check_all_offloaded(load)
    return engine


def measure(seconds: float, min_rounds: int, log: Log) -> dict[str, Any]:
    """All figures; each of the parts takes about ``seconds``."""
    figures: dict[str, Any] = {"torch": torch.__version__, "seconds": seconds}
    # Calls first: peers import a compiler, and where there is one, hooks make more of them.
    parts = measure_frames, measure_tensors, measure_passthrough, measure_slope, measure_groups
    try:
        for part in parts:
            figures |= part(seconds, min_rounds, log)
    finally:
        PipelineOffloadManager.reset_instance()
    return figures


def measure_tensors(seconds: float, min_rounds: int, log: Log) -> dict[str, Any]:
    """The cost of an offloaded tensor, and of a group that has some."""
    loads = {n: Load(1, 1, max(2, 100 // n), n) for n in TENSORS_PER_GROUP}
    peers = [Hooked(name, context) for name, context in installed_peers(NUMEL)]
    ours = {n: ours_for(load) for n, load in loads.items()}
    lagging = {n: ours_for(load, behind=BEHIND) for n, load in loads.items()}
    variants = [IDENTITY, FLOOR, SAVE_ON_CPU, *peers]
    cases = [
        (v, load) for n, load in loads.items() for v in (PLAIN, *variants, ours[n], lagging[n])
    ]
    least = least_ns(cases, 2 * seconds, min_rounds)
    costs = {v.name: {n: cost_ns(least, v, load) for n, load in loads.items()} for v in variants}
    for by_size in (ours, lagging):
        name = by_size[TENSORS_PER_GROUP[0]].name
        costs[name] = {n: cost_ns(least, by_size[n], load) for n, load in loads.items()}
    floor = costs[FLOOR.name]
    log("\ncost per saved tensor of 4 KiB beyond plain autograd, in us, and over the copying floor")
    log(f"  {'tensors per group':24}" + "".join(f"{n:>17}" for n in loads))
    for name, found in costs.items():
        cells = (f"{ns / 1e3:9.2f} ({ns / floor[n]:5.2f})" for n, ns in found.items())
        log(f"  {name:24}" + "".join(cells))
    log(f"  {'target for ours':24}" + "".join(f"{'(':>11}{TARGETS[n]:5.2f})" for n in loads))
    fixed = {name: fixed_us(costs[name]) for name in ("ours", "ours, lagging")}
    log("  a group that saves, beyond its tensors, in us (target 12):")
    log("".join(f"  {name:24}{us:9.2f}\n" for name, us in fixed.items()).rstrip())

    def ratios(name: str) -> dict[str, float]:
        return {str(n): costs[name][n] / floor[n] for n in loads}

    return {
        "ratio_to_floor": ratios("ours"),
        "ratio_to_floor_lagging": ratios("ours, lagging"),
        "cost_ns": costs,
        "group_fixed_us": fixed["ours"],
        "group_fixed_us_lagging": fixed["ours, lagging"],
    }


def fixed_us(costs: dict[int, float]) -> float:
    """What a group costs beside its tensors: from the fewest and the most tensors per group."""
    few, many = min(costs), max(costs)
    return (costs[few] - costs[many]) / (1 / few - 1 / many) / 1e3


def measure_frames(seconds: float, min_rounds: int, log: Log) -> dict[str, Any]:
    """A count, which is the same in each round."""
    many = max(TENSORS_PER_GROUP)
    load = Load(1, 1, 2, many)
    found = {
        name: (num_frames(ours_for(load, behind=behind), load) - num_frames(PLAIN, load))
        for name, behind in (("ours", 0), ("ours, lagging", BEHIND))
    }
    per_tensor = {name: num / load.num_tensors for name, num in found.items()}
    log(f"\nPython functions called for a saved tensor, {many} per group (target 8)")
    for name, num in per_tensor.items():
        log(f"  {name:24}{num:9.2f}")
    return {
        "frames_per_tensor": per_tensor["ours"],
        "frames_per_tensor_lagging": per_tensor["ours, lagging"],
    }


def num_frames(variant: Variant, load: Load) -> int:
    """How many Python functions one run of ``load`` calls."""
    num = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal num
        num += event == "call"

    values = torch.ones(NUMEL)
    sys.setprofile(count)
    try:
        sample_ns(variant, load, values)
    finally:
        sys.setprofile(None)
    return num


def measure_passthrough(seconds: float, min_rounds: int, log: Log) -> dict[str, Any]:
    """A tensor that is not offloaded: an activation, a parameter, or any while nothing is."""
    load, empty = Load(1, 1, 2, 100), Load(1, 1, 2, 0)
    ours = Engine("ours, passed through", MAX_NUMEL)
    disabled = Engine("ours, disabled", 1, is_enabled=False)
    leaf = replace(load, run=added)
    cases = [(v, one) for one in (load, empty) for v in (PLAIN, IDENTITY, ours)]
    least = least_ns(
        [*cases, (disabled, load), *((v, leaf) for v in (PLAIN, IDENTITY, ours))],
        seconds,
        min_rounds,
    )
    costs = {v: cost_ns(least, v, load) for v in (IDENTITY, ours, disabled)}
    of_leaf = {v: cost_ns(least, v, leaf) for v in (IDENTITY, ours)}
    in_groups = {v: least[v, load] - least[v, empty] for v in (PLAIN, IDENTITY, ours)}
    marginal = (in_groups[ours] - in_groups[PLAIN]) / (in_groups[IDENTITY] - in_groups[PLAIN])
    log("\ntensor that stays, 100 per group, beyond plain autograd, in us")
    for variant, ns in costs.items():
        log(f"  {variant.name:24}{ns / 1e3:9.2f} us")
    log(f"  activation / identity hooks {costs[ours] / costs[IDENTITY]:.2f} (target 2.30)")
    log(f"  parameter / identity hooks  {of_leaf[ours] / of_leaf[IDENTITY]:.2f} (target 1.60)")
    log(f"  activation, without the step's and the groups' own cost {marginal:.2f}")
    log(f"  disabled, in us {costs[disabled] / 1e3:.2f} (target 0.30)")
    return {
        "passthrough_ratio": costs[ours] / costs[IDENTITY],
        "passthrough_leaf_ratio": of_leaf[ours] / of_leaf[IDENTITY],
        "passthrough_marginal_ratio": marginal,
        "disabled_us": costs[disabled] / 1e3,
    }


def measure_slope(seconds: float, min_rounds: int, log: Log) -> dict[str, Any]:
    """L2: the cost with few and with many buffers live. Every sample saves 4096 tensors."""
    loads = {32 * m: Load(128 // m, m, 4, 8) for m in (1, 2, 16, 128)}
    engines = {n: ours_for(load) for n, load in loads.items()}
    cases = [(v, load) for n, load in loads.items() for v in (PLAIN, FLOOR, engines[n])]
    least = least_ns(cases, 2 * seconds, min_rounds)
    ours = {n: cost_ns(least, engines[n], load) for n, load in loads.items()}
    floor = {n: cost_ns(least, FLOOR, load) for n, load in loads.items()}
    log("\ncost per saved tensor by live buffers (microbatches of 4 groups of 8 tensors), in us")
    log(f"  {'live buffers':24}" + "".join(f"{n:>9}" for n in loads))
    log(f"  {'microbatches in flight':24}" + "".join(f"{n // 32:>9}" for n in loads))
    for name, costs in ((FLOOR.name, floor), ("ours", ours)):
        log(f"  {name:24}" + "".join(f"{ns / 1e3:9.2f}" for ns in costs.values()))
    slope, floor_slope = ours[4096] / ours[64], floor[4096] / floor[64]
    log(f"  slope from 64 to 4096: {slope:.3f} (target 1.050); of the floor: {floor_slope:.3f}")
    return {"slope": slope, "slope_floor": floor_slope, "cost_ns_by_live_buffers": ours}


def measure_groups(seconds: float, min_rounds: int, log: Log) -> dict[str, Any]:
    """L3: the cost of a group with nothing in it."""
    load = Load(1, 1, 32, 0, has_margin=False)
    markers, two = Markers("start and commit", 1), TwoIdentities()
    engine = Engine("with hooks, and commit", 1)
    least = least_ns([(v, load) for v in (PLAIN, two, markers, engine)], seconds / 2, min_rounds)
    plain_ns = least[PLAIN, load]
    per_group = {v: (least[v, load] - plain_ns) / load.groups for v in (two, markers, engine)}
    ratio = per_group[markers] / per_group[two]
    log("\ngroup that saves nothing, forward and backward, beyond plain autograd")
    for variant, ns in per_group.items():
        log(f"  {variant.name:24}{ns / 1e3:9.2f} us ({ns / per_group[two]:5.2f})")
    log(f"  ratio {ratio:.2f} (target 1.60)")
    return {"group_ratio": ratio, "group_ratio_with_hooks": per_group[engine] / per_group[two]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of the engine's hooks and markers.")
    parser.add_argument("--seconds", type=float, default=20.0, help="per part of four")
    parser.add_argument("--quick", action="store_true", help="one round; the figures mean nothing")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seconds, min_rounds = (0.0, 1) if options.quick else (options.seconds, 5)
    figures = measure(seconds, min_rounds, print)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
