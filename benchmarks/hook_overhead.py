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

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from command import parser_for, write_figures
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from pp_offload import CpuBackend, OffloadConfig, PipelineOffloadManager, use_backend
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface

NUMEL = 1024
"""Elements of a saved tensor: 4 KiB of float32."""

TENSORS_PER_GROUP = (4, 10, 100)
MAX_NUMEL = 2**40
TARGETS = {4: 1.50, 10: 1.25, 100: 0.95}
BEHIND = 3
"""How many copies a lagging backend is behind: one for each of so many groups."""


class LaggingEvent:
    """Has passed when its stream was given ``BEHIND`` more copies, or after a wait for it."""

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

    def __init__(self) -> None:
        self.num_passed = 0
        self._num_queued = 0

    def queued(self) -> None:
        self._num_queued += 1
        self.num_passed = max(self.num_passed, self._num_queued - BEHIND)

    def wait_event(self, event: LaggingEvent) -> None:
        """Nothing to wait for: all that was queued anywhere has been done."""

    def record_event(self) -> LaggingEvent:
        return LaggingEvent(self, self._num_queued)


class LaggingBackend(CpuBackend):
    """A CPU whose copies are done at once and seen as done when ``BEHIND`` more have followed."""

    name = f"cpu, {BEHIND} copies behind"

    def __init__(self) -> None:
        super().__init__()
        self.d2h, self.h2d = LaggingStream(), LaggingStream()

    def copy(
        self, stream: LaggingStream, targets: list[Tensor], sources: list[Tensor], label: str
    ) -> None:
        torch._foreach_copy_(targets, sources)
        stream.queued()

    def synchronize(self) -> None:
        for stream in (self.d2h, self.h2d):
            stream.record_event().synchronize()


@dataclass(frozen=True)
class Load:
    """What a sample runs: so many groups forward, each saving so many tensors, then backward."""

    groups: int
    tensors: int

    @property
    def num_tensors(self) -> int:
        return self.groups * self.tensors


Run = Callable[[Tensor], Tensor]
"""Operations of a group."""


class Variant:
    """A way to save tensors; this one is plain autograd."""

    name = "plain autograd"

    def begin_step(self) -> None:
        """Called before the forward."""

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
        backend: Copies the tensors.
        load: All its tensors are checked to be offloaded, for a figure says nothing otherwise.
    """

    def __init__(self, name: str, backend: CpuBackend, load: Load) -> None:
        self.name = name
        config = OffloadConfig(device_limit_bytes=None, min_offloaded_tensor_size=1)
        with use_backend(backend, config=config) as manager:
            self._manager = manager
        values = torch.ones(NUMEL)
        for _ in range(3):
            before = manager.statistics()
            sample_ns(self, load, values)
            moved = manager.statistics().since(before).bytes_offloaded
        if moved != load.num_tensors * values.nbytes:
            raise RuntimeError(f"{moved} bytes were offloaded, in {load}")

    def begin_step(self) -> None:
        PipelineOffloadManager.OFFLOAD_MGR = self._manager
        off_interface.reset()
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
        x = x.sin()  # saves its input
    return x


def identity(tensor: Tensor) -> Tensor:
    return tensor


def copied(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


PLAIN = Variant()
IDENTITY = Hooked("identity hooks", lambda: saved_tensors_hooks(identity, identity))
FLOOR = Hooked("copying floor", lambda: saved_tensors_hooks(copied, copied))
SAVE_ON_CPU = Hooked("save_on_cpu", save_on_cpu)


def sample_ns(variant: Variant, load: Load, values: Tensor) -> int:
    """Time of one run of ``load``."""
    seed = torch.ones_like(values)
    run = partial(chain, num_tensors=load.tensors)
    start = time.perf_counter_ns()
    variant.begin_step()
    x = values.clone().requires_grad_()  # a storage saved twice moves once
    for _ in range(load.groups):
        x = variant.group(x, run)
    x = variant.group(x, nothing)  # the engine keeps the last group
    torch.autograd.backward(x, seed)
    del x
    return time.perf_counter_ns() - start


Case = tuple[Variant, Load]


@contextmanager
def no_garbage() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def least_ns(cases: Sequence[Case], seconds: float, min_rounds: int) -> dict[Case, int]:
    """The least time of each case; all take turns, for ``seconds`` but ``min_rounds`` at least."""
    values = torch.ones(NUMEL)
    least = {case: sample_ns(*case, values) for case in cases}
    with no_garbage():
        end, rounds = time.perf_counter() + seconds, 0
        while rounds < min_rounds or time.perf_counter() < end:
            for case in cases:
                least[case] = min(least[case], sample_ns(*case, values))
            rounds += 1
    return least


def measure(seconds: float, min_rounds: int) -> dict[str, Any]:
    """All figures, printed."""
    loads = {n: Load(max(2, 100 // n), n) for n in TENSORS_PER_GROUP}
    variants: dict[str, dict[int, Variant]] = {
        variant.name: dict.fromkeys(loads, variant)
        for variant in (PLAIN, IDENTITY, FLOOR, SAVE_ON_CPU)
    }
    inline = partial(CpuBackend, inline_bytes=MAX_NUMEL)
    for name, backend in (("ours", inline), ("ours, lagging", LaggingBackend)):
        variants[name] = {n: Engine(name, backend(), load) for n, load in loads.items()}
    cases = [(variants[name][n], load) for n, load in loads.items() for name in variants]
    least = least_ns(cases, seconds, min_rounds)
    costs = {
        name: {
            n: (least[by_size[n], load] - least[PLAIN, load]) / load.num_tensors
            for n, load in loads.items()
        }
        for name, by_size in variants.items()
        if name != PLAIN.name
    }
    floor = costs[FLOOR.name]
    ratios = {name: {n: ns / floor[n] for n, ns in costs[name].items()} for name in costs}
    print("\ncost per saved tensor of 4 KiB beyond plain autograd, in us, and over the floor")
    print(f"  {'tensors per group':24}" + "".join(f"{n:>17}" for n in loads))
    for name, by_size in costs.items():
        cells = (f"{ns / 1e3:9.2f} ({ratios[name][n]:5.2f})" for n, ns in by_size.items())
        print(f"  {name:24}" + "".join(cells))
    print(f"  {'target for ours':24}" + "".join(f"{'(':>11}{TARGETS[n]:5.2f})" for n in loads))
    return {
        "torch": torch.__version__,
        "ratio_to_floor": ratios["ours"],
        "ratio_to_floor_lagging": ratios["ours, lagging"],
        "cost_ns": costs,
    }


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--seconds", type=float, default=40.0, help="for all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seconds, min_rounds = (0.0, 1) if options.quick else (options.seconds, 5)
    try:
        figures = measure(seconds, min_rounds)
    finally:
        PipelineOffloadManager.reset_instance()
    write_figures(figures, options.json)


if __name__ == "__main__":
    main()
