"""What taking a host buffer costs after many steps, where no two steps have the same sizes.

A step takes buffers of random sizes, gives all or most of them back, and settles the memory, as
the engine does between steps. Each copy out of a buffer is noted in it when it is given back.

    python benchmarks/random_sizes.py --json random_sizes.json

Figures
    us_per_take  time of a take after so many steps, in us, of the case with the largest ratio; the
                 least of the steps around it
    take_ratio   the last of them / the first; the largest over the cases
    by_case      the same for each case

Cases
    done         copies have ended when a buffer is given back
    under way    copies do not end at all, as if the host ran ahead of the device for ever
    not settled  as done, but the memory is never settled
    some live    as done, but a few buffers live for two more steps, and order is random
    experts      as under way, but the sizes split one sum at random
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pp_offload._memory.host_pool import HostBytes, HostPool

NUM_BUFFERS = 64
SMALLEST, LARGEST = 10, 22
"""Of the sizes, as exponents of two."""

NUM_LIVE = 4
"""Buffers of a step that live on, where some do."""

RATIO_TARGET = 1.5
"""Of a take after the most steps and after the fewest."""

NUM_AROUND = 10
"""Steps whose least time counts."""


class Copy:
    """The end of a copy."""

    def __init__(self, *, has_ended: bool) -> None:
        self.has_ended = has_ended

    def query(self) -> bool:
        return self.has_ended

    def synchronize(self) -> None:
        self.has_ended = True


class Owner:
    """Whoever has this has its memory."""

    __slots__ = ("__weakref__", "host")

    host: HostBytes


@dataclass(frozen=True)
class Case:
    """How the buffers of a step are used."""

    copies_end: bool = True
    is_settled: bool = True
    some_live: bool = False
    is_split: bool = False

    def sizes(self, draw: random.Random) -> list[int]:
        """Of one step."""
        if not self.is_split:
            return [int(2 ** draw.uniform(SMALLEST, LARGEST)) for _ in range(NUM_BUFFERS)]
        total = NUM_BUFFERS * 2 ** (LARGEST - 3)
        cuts = sorted(draw.sample(range(1, total), NUM_BUFFERS - 1))
        return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


CASES = {
    "done": Case(),
    "under way": Case(copies_end=False),
    "not settled": Case(is_settled=False),
    "some live": Case(some_live=True),
    "experts": Case(copies_end=False, is_split=True),
}


class Steps:
    """Steps of one case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.draw = random.Random(0)
        self.pool = HostPool(allocate)
        self.alive: deque[list[Owner]] = deque([[], []])

    def step(self) -> float:
        """Seconds of a take."""
        sizes = self.case.sizes(self.draw)
        begin = time.perf_counter()
        held = []
        for nbytes in sizes:
            owner = Owner()
            owner.host = self.pool.take([nbytes], owner)
            held.append(owner)
        spent = time.perf_counter() - begin
        for owner in held:
            owner.host.last_use = Copy(has_ended=self.case.copies_end)
        del owner
        self._give_back(held)
        if self.case.is_settled:
            self.pool.settle()
        return spent / len(sizes)

    def _give_back(self, held: list[Owner]) -> None:
        if self.case.some_live:
            self.draw.shuffle(held)
            self.alive.append(held[:NUM_LIVE])
            self.alive.popleft()
        while held:
            held.pop(0)


def allocate(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def us_per_take(case: Case, marks: list[int]) -> dict[str, float]:
    """Least time of a take in the steps up to each mark, in us."""
    steps, found = Steps(case), {}
    last: deque[float] = deque(maxlen=NUM_AROUND)
    for number in range(1, max(marks) + 1):
        last.append(steps.step())
        if number in marks:
            found[str(number)] = min(last) * 1e6
    return found


def measure(marks: list[int]) -> dict[str, Any]:
    by_case: dict[str, dict[str, float]] = {}
    ratios: dict[str, float] = {}
    print(f"{'us per take after':20}" + "".join(f"{mark:10} steps" for mark in marks))
    gc.disable()
    for name, case in CASES.items():
        by_case[name] = found = us_per_take(case, marks)
        ratios[name] = found[str(marks[-1])] / found[str(marks[0])]
        times = "".join(f"{found[str(mark)]:16.1f}" for mark in marks)
        print(f"  {name:18}{times}   ratio {ratios[name]:.2f} (target {RATIO_TARGET:.2f})")
        gc.collect()
    gc.enable()
    worst = max(ratios, key=lambda name: ratios[name])
    return {"us_per_take": by_case[worst], "take_ratio": ratios[worst], "by_case": by_case}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, nargs=2, default=[50, 1000], help="few, and many")
    parser.add_argument("--quick", action="store_true", help="few steps; the figures mean nothing")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = measure([5, 10] if options.quick else options.steps)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
