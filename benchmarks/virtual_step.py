"""The acceptance table: step time and peak memory on a virtual accelerator, in 1F1B's steady state.

Nothing is measured: the engine runs on streams with clocks and tensors without data. Each row is a
stage of a model: two layers with four microbatches in flight, unless options say otherwise. Bounds
of both directions are tried in pairs, as fractions of what a microbatch offloads, and the least
peak of those that keep the step is the best that default options can be held to. Where copies need
more than 0.9 of compute's time, they are held to the law alone: a step takes at least as long as
the copies of one direction. A peak that the device has no memory for is marked with a star. Nothing
is computed again, for the table is one of copies; rematerialize.py has both.

    python benchmarks/virtual_step.py --model gpt llama --hidden 4096 8192 --json virtual.json

Figures, of each model, width and length; a row for each way to save memory
    bounds         none; default; cap/window, of which the best is shown, and all that were tried
                   with --json or --full; and peers
                     save_on_cpu   of PyTorch, pinned: it copies on the compute stream
                     recompute     each layer under PyTorch's checkpoint
                     inputs        the same, and inputs of layers are offloaded by the engine
                     megatron      Megatron-Core's own module, where installed, in the same groups;
                                   virtual_megatron.py has how it is driven
    step_ms        of a forward and a backward, in the steady state
    ratio_to_none  of step times
    peak_gib       of the device; parameters and gradients count
    at_peak_gib    what that was for, by category; only with --json
    stalled_ms     how long compute waited in a step
    need           of the copies: bytes of a microbatch over the link / step without offload,
                     of the direction in which more go
    best_gib       of the default row: the least peak of pairs with a ratio of at most 1.01;
                   best_bounds are those of such a pair
    peak_to_best   of the default row
    verdict        of the default row: ok, slow, peak, or both; virtual_search.py has the bounds
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import virtual_megatron
from torch import Tensor
from virtual_models import PARTS, Stage
from virtual_search import MAX_RATIO, Found, least_peak, verdict
from virtual_ways import HOST_BYTES, forward_of, interface_of, peers

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, use_backend
from pp_offload.simulate import DEVICES, VirtualBackend

GIB = 2**30
MIN_NUMEL = 2**20
FRACTIONS = [0.15, 0.25, 0.35, 0.5, 0.65, 0.8, 1.0, 1.5]
Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """What is the same for all rows that are compared."""

    device: str
    model: str
    width: int
    length: int
    num_layers: int
    in_flight: int
    """Microbatches."""
    rounds: int
    """Microbatches that are looked at, in the steady state."""
    is_synchronized: bool = False
    """Whether the host waits for the device after each forward and each backward."""

    def stage(self) -> Stage:
        return Stage(self.model, self.width, self.length, self.num_layers)


def measure(cell: Cell, way: str, config: OffloadConfig) -> Row:
    """A step after a first one, from which the engine knows what comes."""
    backend = VirtualBackend(DEVICES[cell.device])
    compute, link = backend.compute, backend.link

    def wait() -> None:
        if cell.is_synchronized:
            backend.synchronize()

    def now() -> tuple[float, float, int, int]:
        return compute.free_at_s, compute.stalled_s, link.bytes_to_host, link.bytes_to_device

    with ExitStack() as entered:
        manager = entered.enter_context(use_backend(backend, config=config))
        stage = cell.stage()
        backend.memory.follow(stage)
        backend.memory.follow_groups(manager)
        interface = entered.enter_context(interface_of(way, stage, backend))
        run = forward_of(way, stage, backend, interface)

        def forward() -> Tensor:
            interface.init_chunk_handler(None, None, MIN_NUMEL)
            y = run(stage.microbatch())
            wait()
            return y

        def backward(y: Tensor) -> None:
            stage.backward(y)
            wait()

        for _ in range(3):  # the first ones are timed
            interface.reset()
            waiting = deque(forward() for _ in range(cell.in_flight - 1))
            for number in range(cell.in_flight + cell.rounds):
                if number == cell.in_flight:
                    before = now()
                    backend.memory.take_peak()
                waiting.append(forward())
                backward(waiting.popleft())
            step_s, stalled_s, left, came = (
                (after - one) / cell.rounds for after, one in zip(now(), before, strict=True)
            )
            peak_bytes, at_peak = backend.memory.peak_bytes, backend.memory.at_peak
            while waiting:
                backward(waiting.popleft())
            stage.zero_grad()
            backend.synchronize()
    return {
        "step_ms": step_s * 1e3,
        "peak_gib": peak_bytes / GIB,
        "at_peak_gib": {name: nbytes / GIB for name, nbytes in at_peak.items()},
        "stalled_ms": stalled_s * 1e3,
        "fits": peak_bytes <= backend.hardware.memory_bytes,
        "link_ms": max(left, came) / backend.hardware.d2h_rate * 1e3,
    }


def chunk_bytes(cell: Cell) -> int:
    """What a microbatch offloads where nothing stays, which the bounds are fractions of."""
    backend = VirtualBackend(DEVICES[cell.device])
    with use_backend(
        backend,
        config=OffloadConfig(
            device_limit_bytes=None,
            max_in_flight_bytes=0,
            host_budget_bytes=HOST_BYTES,
            rematerialize="none",
        ),
    ) as manager:
        off_interface.init_chunk_handler(None, None, MIN_NUMEL)
        stage = cell.stage()
        y = stage(stage.microbatch(), offload=True)
        nbytes = manager.statistics().bytes_offloaded
        stage.backward(y)
    return nbytes


class Rows:
    """The rows of a cell, each run once.

    Args:
        cell: What they have in common.
    """

    def __init__(self, cell: Cell) -> None:
        self.found: dict[str, Row] = {}
        self._cell = cell
        self._chunk_bytes = chunk_bytes(cell)

    def run(self, name: str, way: str, **bounds: int) -> Row:
        """One row, compared to that without offload, which has to be the first."""
        if name not in self.found:
            cell = self._cell
            row = {"model": cell.model, "width": cell.width, "length": cell.length, "bounds": name}
            self.found[name] = row | measure(
                cell,
                way,
                OffloadConfig(
                    device_limit_bytes=None,
                    host_budget_bytes=HOST_BYTES,
                    rematerialize="none",
                    **bounds,
                ),
            )
            none_ms = self.found["none"]["step_ms"]
            row = self.found[name]
            row["ratio_to_none"] = row["step_ms"] / none_ms
            row["need"] = row.pop("link_ms") / none_ms
        return self.found[name]

    def pair(self, cap: float, window: float) -> Found:
        """A row with these fractions of a microbatch's bytes in flight and in the window."""
        row = self.run(
            f"{cap:.3g}/{window:.3g}",
            "ours",
            max_in_flight_bytes=int(cap * self._chunk_bytes),
            prefetch_bytes=int(window * self._chunk_bytes),
        )
        return Found(row["ratio_to_none"], row["peak_gib"])


def rows(cell: Cell, options: argparse.Namespace) -> list[Row]:
    """All rows of a cell."""
    found = Rows(cell)
    found.run("none", "none")
    default = found.run("default", "ours")
    for peer in peers():
        found.run(peer, peer)
    if options.without_pairs:
        return list(found.found.values())
    caps, windows = sorted(options.caps), sorted(options.windows)
    if options.full:
        for cap in caps:
            for window in windows:
                found.pair(cap, window)
    best = least_peak(caps, windows, found.pair)
    fast = (row for row in found.found.values() if "/" in row["bounds"] and is_best(row, best))
    default["best_bounds"] = next((row["bounds"] for row in fast), None)
    default["best_gib"] = best
    default["peak_to_best"] = None if best is None else default["peak_gib"] / best
    default["verdict"] = verdict(
        default["ratio_to_none"], default["peak_gib"], default["need"], best
    )
    return list(found.found.values())


def is_best(row: Row, best_gib: float | None) -> bool:
    """Whether no row that keeps the step has a lower peak, and it does."""
    return row["peak_gib"] == best_gib and row["ratio_to_none"] <= MAX_RATIO


def shown(found: list[Row], options: argparse.Namespace) -> list[Row]:
    """The rows of a cell for the table: of the pairs only the best, unless all were tried."""
    best = next(row.get("best_bounds") for row in found if row["bounds"] == "default")
    return [
        row for row in found if options.full or "/" not in row["bounds"] or row["bounds"] == best
    ]


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    counts = options.layers, options.in_flight, options.rounds
    first = Cell(options.device, "", 0, 0, *counts, is_synchronized=options.synchronize)
    for model in options.model:
        for width in options.hidden:
            for length in options.length:
                yield replace(first, model=model, width=width, length=length)


HEADER = (
    f"{'model':>6}  {'width':>6}  {'length':>6}  {'bounds':>11}  step ms  to none  peak GiB  "
    "stalled ms  need  best GiB  to best  verdict"
)


def line(row: Row) -> str:
    """Of the table."""
    text = (
        f"{row['model']:>6}  {row['width']:>6}  {row['length']:>6}  {row['bounds']:>11}  "
        f"{row['step_ms']:7.2f}  {row['ratio_to_none']:7.3f}  "
        f"{row['peak_gib']:8.2f}{' ' if row['fits'] else '*'} {row['stalled_ms']:10.2f}  "
        f"{row['need']:4.2f}"
    )
    if "verdict" in row:
        best = [
            f"{'-' if one is None else f'{one:.2f}':>{num}}"
            for one, num in ((row["best_gib"], 8), (row["peak_to_best"], 7))
        ]
        text += f"  {best[0]}  {best[1]}  {row['verdict']}"
    return text


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=sorted(DEVICES), default="H100")
    parser.add_argument("--model", choices=sorted(PARTS), nargs="+", default=list(PARTS))
    widths = [2048, 3072, 4096, 6144, 8192, 12288]
    parser.add_argument("--hidden", type=int, nargs="+", default=widths)
    parser.add_argument(
        "--length", type=int, nargs="+", default=[4096, 8192], help="tokens of a microbatch"
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--in-flight", type=int, default=4, help="microbatches")
    parser.add_argument("--rounds", type=int, default=4)
    fractions = "fractions of the bytes that a microbatch offloads"
    parser.add_argument("--caps", type=float, nargs="+", default=FRACTIONS, help=fractions)
    parser.add_argument("--windows", type=float, nargs="+", default=FRACTIONS, help=fractions)
    parser.add_argument("--full", action="store_true", help="try all pairs, not only the edge")
    parser.add_argument("--without-pairs", action="store_true", help="try none")
    parser.add_argument(
        "--synchronize",
        action="store_true",
        help="the host waits for the device after each forward and each backward",
    )
    parser.add_argument("--quick", action="store_true", help="a small smoke test")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if options.quick:
        options.model, options.hidden, options.length = ["gpt"], [8192], [4096]
        options.caps, options.windows = [0.5, 1.0], [0.5, 1.0]
        options.in_flight = options.rounds = 2
    return options


def main() -> None:
    options = parse()
    print(f"{options.device}, {options.layers} layers, {options.in_flight} microbatches in flight")
    if options.synchronize:
        print("the host waits for the device after each forward and each backward")
    if reason := virtual_megatron.why_not():
        print(f"megatron is left out: {reason}")
    print(HEADER)
    found: list[Row] = []
    for cell in cells(options):
        of_cell = rows(cell, options)
        found += of_cell
        for row in shown(of_cell, options):
            print(line(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
