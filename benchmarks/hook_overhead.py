"""What the engine costs per saved tensor and per group, beside what nobody can avoid.

On the CPU with small copies done inline, so that no thread hand-off is counted. All variants run
the same graph in one process, in turns; a figure is the least of many rounds. The cost of a variant
is its time minus that of plain autograd. The floor is hooks that do ``empty`` and ``copy_`` both
ways. ``save_on_cpu`` copies nothing here, since the tensors are on the CPU already.

    python benchmarks/hook_overhead.py --json overhead.json

Figures
    ratio_to_floor     cost of an offloaded tensor / the floor's, by tensors per group
    passthrough_ratio  cost of a tensor too small to move / that of identity hooks
    slope              cost of an offloaded tensor with 4096 buffers live / with 64
    group_ratio        cost of a group around an operation that saves nothing: start and commit,
                       forward and backward / cost of two identity autograd functions there
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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
TARGETS = {4: 2.0, 10: 1.6, 100: 1.3}


class Variant:
    """A way to save tensors; this one is plain autograd. Others change what they must."""

    name = "plain autograd"

    def install(self) -> None:
        """Before the clock starts."""

    def begin_step(self) -> None:
        """Before the first microbatch."""

    def begin_microbatch(self) -> None:
        """Before the forward of each microbatch."""

    def group(self, x: Tensor, num_tensors: int) -> Tensor:
        """A chain of operations that save one tensor each."""
        return chain(x, num_tensors)


class Hooked(Variant):
    """A context manager around each group."""

    def __init__(self, name: str, context: Callable[[], Any]) -> None:
        self.name = name
        self._context = context

    def group(self, x: Tensor, num_tensors: int) -> Tensor:
        with self._context():
            return chain(x, num_tensors)


class Engine(Variant):
    """Ours, as a layer uses it. Tensors of fewer than ``min_numel`` elements are passed through.

    Each has a manager of its own, which learns the plan of one load.
    """

    def __init__(self, name: str, min_numel: int) -> None:
        self.name = name
        self._min_numel = min_numel
        config = OffloadConfig(min_offloaded_tensor_size=1)
        with use_backend(CpuBackend(inline_bytes=MAX_NUMEL), config=config) as manager:
            self._manager = manager

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

    def group(self, x: Tensor, num_tensors: int) -> Tensor:
        with off_interface(True, x, "group") as x:
            y = chain(x, num_tensors)
        return off_interface.group_commit(y, name="group")


class Markers(Engine):
    """Ours with the functions for start and commit, and no hooks."""

    def group(self, x: Tensor, num_tensors: int) -> Tensor:
        y = chain(fine_grained_offloading_group_start(x, "group"), num_tensors)
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

    def group(self, x: Tensor, num_tensors: int) -> Tensor:
        return Identity.apply(chain(Identity.apply(x), num_tensors))


def chain(x: Tensor, num_tensors: int) -> Tensor:
    if num_tensors == 0:
        return x.view_as(x)  # saves nothing, but gives markers that are hooks a node
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

    has_margin: bool = True
    """Whether an empty group ends each microbatch: the engine keeps the last one on the device."""

    @property
    def num_tensors(self) -> int:
        """Saved tensors in all steps."""
        return self.steps * self.microbatches * self.groups * self.tensors


def sample_ns(variant: Variant, load: Load, values: Tensor) -> int:
    """Time of one run of ``load``."""
    seed = torch.ones_like(values)
    variant.install()
    start = time.perf_counter_ns()
    for _ in range(load.steps):
        variant.begin_step()
        outputs = []
        for _ in range(load.microbatches):
            variant.begin_microbatch()
            x = values.clone().requires_grad_()  # a storage saved twice moves once
            for _ in range(load.groups):
                x = variant.group(x, load.tensors)
            outputs.append(variant.group(x, 0) if load.has_margin else x)
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


def ours_for(load: Load) -> Engine:
    """Ours, checked to offload every tensor of ``load``."""
    engine = Engine("ours", 1)
    engine.check_all_offloaded(load)
    return engine


def measure(seconds: float, min_rounds: int, log: Log) -> dict[str, Any]:
    """All figures; each of the four parts takes about ``seconds``."""
    figures: dict[str, Any] = {"torch": torch.__version__, "seconds": seconds}
    try:
        for part in (measure_tensors, measure_passthrough, measure_slope, measure_groups):
            figures |= part(seconds, min_rounds, log)
    finally:
        PipelineOffloadManager.reset_instance()
    return figures


def measure_tensors(seconds: float, min_rounds: int, log: Log) -> dict[str, Any]:
    """L1: the cost of an offloaded tensor."""
    loads = {n: Load(1, 1, max(2, 100 // n), n) for n in TENSORS_PER_GROUP}
    peers = [Hooked(name, context) for name, context in installed_peers(NUMEL)]
    ours = {n: ours_for(load) for n, load in loads.items()}
    variants = [IDENTITY, FLOOR, SAVE_ON_CPU, *peers]
    cases = [(v, load) for n, load in loads.items() for v in (PLAIN, *variants, ours[n])]
    least = least_ns(cases, seconds, min_rounds)
    costs = {v.name: {n: cost_ns(least, v, load) for n, load in loads.items()} for v in variants}
    costs["ours"] = {n: cost_ns(least, ours[n], load) for n, load in loads.items()}
    floor = costs[FLOOR.name]
    log("cost per saved tensor of 4 KiB beyond plain autograd, in us (and over the copying floor)")
    log(f"  {'tensors per group':24}" + "".join(f"{n:>17}" for n in loads))
    for name, by_size in costs.items():
        cells = (f"{ns / 1e3:9.2f} ({ns / floor[n]:5.2f})" for n, ns in by_size.items())
        log(f"  {name:24}" + "".join(cells))
    log(f"  {'target for ours':24}" + "".join(f"{'(':>11}{TARGETS[n]:5.2f})" for n in loads))
    ratios = {str(n): costs["ours"][n] / floor[n] for n in loads}
    return {"ratio_to_floor": ratios, "cost_ns": costs}


def measure_passthrough(seconds: float, min_rounds: int, log: Log) -> dict[str, Any]:
    """The second half of L1: a tensor that is not offloaded."""
    load, empty = Load(1, 1, 2, 100), Load(1, 1, 2, 0)
    ours = Engine("ours, passed through", MAX_NUMEL)
    cases = [(v, one) for one in (load, empty) for v in (PLAIN, IDENTITY, ours)]
    least = least_ns(cases, seconds / 2, min_rounds)
    net = cost_ns(least, ours, load) / cost_ns(least, IDENTITY, load)
    in_groups = {v: least[v, load] - least[v, empty] for v in (PLAIN, IDENTITY, ours)}
    marginal = (in_groups[ours] - in_groups[PLAIN]) / (in_groups[IDENTITY] - in_groups[PLAIN])
    gross = least[ours, load] / least[IDENTITY, load]
    log("\ntensor passed through, 100 per group, beyond plain autograd")
    for variant in (IDENTITY, ours):
        log(f"  {variant.name:24}{cost_ns(least, variant, load) / 1e3:9.2f} us")
    log(f"  ratio {net:.2f} (target 1.50); with plain autograd's time in both {gross:.2f}")
    log(f"  ratio without the step's and the groups' own cost {marginal:.2f}")
    return {
        "passthrough_ratio": net,
        "passthrough_gross_ratio": gross,
        "passthrough_marginal_ratio": marginal,
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
