"""What the virtual accelerator predicts, against what threads that take the same time need.

Random programs run on the accelerator of the tests, whose kernels and copies sleep, and on the
virtual one. On the first the engine, its waits and autograd's threads are real. A program is a
chain of groups of functions, with microbatches in 1F1B order or all forwards before all backwards,
copies and bounds of its own, or bounds that the engine chooses; in some the host waits for each
backward.

The virtual device is given times of single operators, copies and launches, measured without the
engine in the same rounds: a kernel's is that of the program without offload, per kernel; a copy's
that of copies alone, both ways at once. A launch takes the host's time for a step, per launch. All
are minima over the rounds, and so are both steps: those of a program need not be alike, as where a
tensor lies in two pieces of host memory in every other one, and is copied in two.

    python benchmarks/paced.py --json paced.json    # 25 minutes, most of them asleep

Figures, of each program
    predicted_ms, measured_ms, error   of a step with offload; error is predicted / measured - 1
    none_ms        a step without offload, measured
    stall          how long compute waits for copies, of its work, by the virtual device
    ratio_to_none  of measured times
    kernel_ms, copy_ms, launch_us      what the virtual device was given
    counts         kernels, copies and bytes of a step; virtual_counts are those predicted
    bounds         bytes in flight and in the window at the end; virtual_bounds are those predicted
    bitwise_equal  whether gradients with offload are those without
and of all: mean_error and worst_error, of their absolute values
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from in_flight_caps import same_bits
from machine import device_of
from paced_programs import Program, Run, draw, hardware, small
from torch import Tensor

from pp_offload import use_backend
from pp_offload.backends import Stream, default_backend
from pp_offload.simulate import Hardware, VirtualBackend

KINDS = ("kernel", "h2d", "d2h")
MOVED = ("bytes_offloaded", "bytes_reloaded", "taken_back")
NUM_FIRST = {False: 2, True: 6}
"""Steps after which the plan is made and, where they are left to the engine, bounds are chosen."""

Row = dict[str, Any]
Counts = dict[str, int]
Bounds = tuple[int, int]


def counted(num: Counts, manager: Any) -> Counts:
    """All that a device and an engine count."""
    moved = manager.statistics()
    return {kind: num[kind] for kind in KINDS} | {name: getattr(moved, name) for name in MOVED}


def beyond(after: Counts, before: Counts) -> Counts:
    return {key: after[key] - before[key] for key in after}


def bounds_of(manager: Any) -> Bounds:
    offloader = manager.offloader
    return offloader.engine.mover.in_flight.bound.nbytes, offloader.engine.window.bound.nbytes


@dataclass
class Measured:
    """Of each round, in seconds; and what a step did."""

    ours: list[float] = field(default_factory=list)
    none: list[float] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)
    launch: list[float] = field(default_factory=list)
    counts: Counts = field(default_factory=dict)
    bounds: Bounds = (0, 0)
    bitwise_equal: bool = True


class Paced:
    """One program on the accelerator made of threads.

    Args:
        program: What runs.
        device: Where.
        kernel_s: How long a kernel sleeps.
    """

    def __init__(self, program: Program, device: torch.device, kernel_s: float) -> None:
        self._program = program
        self._device = device
        self._module = torch.get_device_module(device)
        kernel_us, copy_us = (round(s * 1e6) for s in (kernel_s, program.copy_s(kernel_s)))
        self._delays = {"kernel_us": kernel_us, "h2d_us": copy_us, "d2h_us": copy_us}
        self._lead = torch.ones(1, device=device)

    def measure(self, rounds: int) -> Measured:
        """Steps with offload, without, and copies alone, in turns."""
        found = Measured()
        run = Run(self._program, self._device, torch.accelerator.synchronize)
        self._module.set_delays(**self._delays)
        try:
            with use_backend(
                default_backend(self._device), config=self._program.config()
            ) as manager:
                for _ in range(NUM_FIRST[self._program.bounds is None]):
                    self._step(lambda: run.step(offload=True))
                for _ in range(rounds):
                    self._round(run, manager, found)
                found.bounds = bounds_of(manager)
        finally:
            self._module.set_delays()
        return found

    def _round(self, run: Run, manager: Any, found: Measured) -> None:
        before = counted(self._module.num_queued(), manager)
        ours_s, _, ours = self._step(lambda: run.step(offload=True))
        found.counts = beyond(counted(self._module.num_queued(), manager), before)
        found.counts["kernel"] -= 1  # that before the step
        none_s, host_s, none = self._step(lambda: run.step(offload=False))
        found.ours.append(ours_s)
        found.none.append(none_s)
        found.launch.append(host_s / found.counts["kernel"])
        found.copy.append(self._copies())
        found.bitwise_equal &= same_bits(none, ours)

    def _step(self, run: Callable[[], list[Tensor]]) -> tuple[float, float, list[Tensor]]:
        """Seconds of compute's stream, and of the host to queue it; the results."""
        torch.accelerator.synchronize()
        begin, end = self._events()
        self._lead.add_(1)  # the host goes ahead meanwhile
        begin.record()
        start = time.perf_counter()
        results = run()
        host_s = time.perf_counter() - start
        end.record()
        torch.accelerator.synchronize()
        return begin.elapsed_time(end) / 1e3, host_s, results

    def _copies(self) -> float:
        """Seconds of a copy, of those of a microbatch's tensors, both ways at once."""
        sizes = [node.numel for node in self._program.nodes]
        timed = []
        for to_host in (True, False):
            on_device = [torch.ones(n, device=self._device) for n in sizes]
            on_host = [torch.ones(n, pin_memory=True) for n in sizes]
            torch.accelerator.current_stream().synchronize()
            begin, end = self._events()
            with torch.Stream(device=self._device) as side:
                begin.record(side)
                for here, there in zip(on_host, on_device, strict=True):
                    (here if to_host else there).copy_(there if to_host else here, True)
                end.record(side)
            timed.append((begin, end, on_device, on_host))
        torch.accelerator.synchronize()
        return sum(one[0].elapsed_time(one[1]) for one in timed) / 1e3 / (2 * len(sizes))

    def _events(self) -> tuple[torch.Event, torch.Event]:
        return (
            torch.Event(device=self._device, enable_timing=True),
            torch.Event(device=self._device, enable_timing=True),
        )


class Counting(VirtualBackend):
    """The virtual device with a time for all operators, and counts as the other device has them."""

    def __init__(self, hardware: Hardware, kernel_s: float) -> None:
        super().__init__(hardware, self._kernel)
        self._copies = dict.fromkeys(KINDS, 0)
        self._kernel_s = kernel_s

    def _kernel(self, *call: object) -> float:
        return self._kernel_s  # asked once for all calls with the same sizes

    @property
    def num(self) -> dict[str, int]:
        """So far; each kernel keeps compute busy for as long."""
        return self._copies | {"kernel": round(self.compute.busy_s / self._kernel_s)}

    def copy(
        self, stream: Stream, targets: list[Tensor], sources: list[Tensor], label: str
    ) -> None:
        self._copies["d2h" if stream is self.d2h else "h2d"] += len(targets)
        super().copy(stream, targets, sources, label)


def predict(program: Program, backend: Counting, rounds: int) -> Row:
    """Steps on the virtual device, after the same first ones: the least, and what the last did."""
    run = Run(program, backend.device, backend.synchronize)
    compute = backend.compute
    with use_backend(backend, config=program.config()) as manager:
        lead = torch.ones(1, device=backend.device)
        first, steps = NUM_FIRST[program.bounds is None], []
        for _ in range(first + rounds):
            backend.synchronize()
            lead.add_(1)
            before = counted(backend.num, manager)
            begin_s, busy_s, stalled_s = compute.free_at_s, compute.busy_s, compute.stalled_s
            run.step(offload=True)
            stall = (compute.stalled_s - stalled_s) / (compute.busy_s - busy_s)
            steps.append(((compute.record_event().time_s - begin_s) * 1e3, stall))
        predicted_ms, stall = min(steps[first:])
        return {
            "predicted_ms": predicted_ms,
            "stall": stall,
            "virtual_counts": beyond(counted(backend.num, manager), before),
            "virtual_bounds": bounds_of(manager),
        }


def compare(program: Program, device: torch.device, kernel_s: float, rounds: int) -> Row:
    """The figures of one program."""
    found = Paced(program, device, kernel_s).measure(rounds)
    none_s, ours_s = min(found.none), min(found.ours)
    kernel_s = none_s / found.counts["kernel"]
    launch_s, copy_s = min(found.launch), min(found.copy)
    predicted = predict(program, Counting(hardware(launch_s, copy_s), kernel_s), rounds)
    return {
        "seed": program.seed,
        "groups": len(program.groups),
        "microbatches": program.num_microbatches,
        "in_flight": program.in_flight,
        "host_waits": program.host_waits,
        "is_auto": program.bounds is None,
        **predicted,
        "measured_ms": ours_s * 1e3,
        "error": predicted["predicted_ms"] / (ours_s * 1e3) - 1,
        "ratio_to_none": ours_s / none_s,
        "none_ms": none_s * 1e3,
        "kernel_ms": kernel_s * 1e3,
        "copy_ms": copy_s * 1e3,
        "launch_us": launch_s * 1e6,
        "counts": found.counts,
        "bounds": found.bounds,
        "bitwise_equal": found.bitwise_equal,
        "all_ms": [one * 1e3 for one in found.ours],
    }


HEAD = (
    "seed  mb  ahead  waits  bounds  kernels  copies  none ms  predicted  measured  error %  "
    "to none  stall %  counts"
)


def line(one: Row) -> str:
    counts = one["counts"]
    return (
        f"{one['seed']:4}  {one['microbatches']:2}  {one['in_flight']:5}  "
        f"{'yes' if one['host_waits'] else 'no':>5}  {'auto' if one['is_auto'] else 'given':>6}  "
        f"{counts['kernel']:7}  {counts['h2d'] + counts['d2h']:6}  {one['none_ms']:7.1f}  "
        f"{one['predicted_ms']:9.1f}  {one['measured_ms']:8.1f}  {one['error'] * 100:7.2f}  "
        f"{one['ratio_to_none']:7.3f}  {one['stall'] * 100:7.1f}  "
        f"{'same' if counts == one['virtual_counts'] else 'OTHER':>6}"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--programs", type=int, default=30, help="seeds 0, 1, ...")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--kernel-ms", type=float, default=20, help="how long a kernel sleeps")
    parser.add_argument("--rounds", type=int, default=6, help="of which the minimum counts")
    parser.add_argument("--quick", action="store_true", help="a small smoke test")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if min(options.programs, options.rounds, options.kernel_ms) <= 0:
        parser.error(
            "--programs, --rounds and --kernel-ms are above 0; leave them out, or give more"
        )
    if options.quick:
        options.programs, options.kernel_ms, options.rounds = 2, 1, 1
    return options


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    device = device_of("emulated")
    print(HEAD)
    rows = []
    for seed in range(options.first, options.first + options.programs):
        program = small(draw(seed)) if options.quick else draw(seed)
        rows.append(compare(program, device, options.kernel_ms / 1e3, options.rounds))
        print(line(rows[-1]), flush=True)
    errors = [abs(one["error"]) for one in rows]
    figures = {"mean_error": statistics.mean(errors), "worst_error": max(errors), "programs": rows}
    print(f"error: mean {figures['mean_error']:.2%}, worst {figures['worst_error']:.2%}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
