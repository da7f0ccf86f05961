"""How exact ``predict`` is: beside the engine itself on virtual devices, on random pipelines.

Each seed draws modules, groups, options, a schedule and a machine, as the tests of plans do. Of
seven, one is as it is drawn, one has about half of its layers recomputed, one has backwards in two
parts, one is V-shaped, one has too little host memory, one an optimizer, and one of any of the
first four kinds a disk. The engine runs the pipeline, all bytes and counts of each rank have to be
equal, and times are compared.

    nice python benchmarks/predict_exact.py --pipelines 10000 --processes 2

Figures
    num_compared      pipelines
    num_lists         of them, lists of actions: one for each of their ranks
    num_offloading    of them, those from whose devices bytes left
    num_unequal       of them, those with another count or byte on any rank; each is printed
    worst_time_gap    the largest difference of any time of any rank, as a part of its step
    failed            seeds that neither ran nor were predicted, and why; they are not compared
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from dataclasses import dataclass
from multiprocessing import Pool
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.plans.beside_engine import (
    ran,
    ran_split,
    ran_v_shaped,
    ran_with_budget,
    ran_with_disk,
    ran_with_optimizer,
    ran_with_recomputed,
)

from pp_offload._groups import auto_bounds

KINDS = (
    *(ran, ran_with_recomputed, ran_split, ran_v_shaped),
    *(ran_with_budget, ran_with_optimizer, ran_with_disk),
)


@dataclass(frozen=True)
class Row:
    """What became of a seed."""

    seed: int
    unequal: list[str]
    times: list[str]
    time_gap: float = 0.0
    num_ranks: int = 0
    is_offloading: bool = False
    failure: str = ""


def compared(seed: int) -> Row:
    """That of one pipeline."""
    try:
        found = KINDS[seed % len(KINDS)](seed)
        one = found.compared()
    except Exception as failure:  # noqa: BLE001  # one of thousands: the others go on
        return Row(seed, [], [], failure=f"{type(failure).__name__}: {failure}")
    is_offloading = any(rank.bytes_offloaded for rank in found.ran)
    return Row(seed, one.unequal, one.times, one.time_gap, len(found.ran), is_offloading)


def prepare() -> None:
    """A process for pipelines as small as these."""
    logging.disable(logging.CRITICAL)
    auto_bounds.LEAST_IN_FLIGHT_BYTES = 1


def figures(rows: list[Row]) -> dict[str, Any]:
    """Of all that were compared."""
    done = [row for row in rows if not row.failure]
    return {
        "num_compared": len(done),
        "num_lists": sum(row.num_ranks for row in done),
        "num_offloading": sum(row.is_offloading for row in done),
        "num_unequal": sum(bool(row.unequal) for row in done),
        "worst_time_gap": max((row.time_gap for row in done), default=0.0),
        "failed": {row.seed: row.failure for row in rows if row.failure},
    }


def main() -> None:
    """Compare, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pipelines", type=int, default=100, help="default: 100")
    parser.add_argument("--seed", type=int, default=0, help="of the first; default: 0")
    parser.add_argument("--processes", type=int, default=1, help="default: 1")
    parser.add_argument("--quick", action="store_true", help="one of each")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + (len(KINDS) if options.quick else options.pipelines))
    rows = []
    with Pool(options.processes, prepare) as pool:
        for row in pool.imap_unordered(compared, seeds, chunksize=8):
            rows.append(row)
            for said in [*row.unequal, *row.times, row.failure]:
                if said:
                    print(f"seed {row.seed}: {said}", flush=True)
    found = figures(rows)
    for name, value in found.items():
        print(f"{name:16}{len(value) if name == 'failed' else value:>12.6g}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
