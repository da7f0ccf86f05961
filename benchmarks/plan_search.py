"""Plans beside the best of all choices, on random pipelines, and what they cost to find.

For each pipeline with few groups every choice of groups is predicted, within three sizes of bounds,
and with ``--recompute`` with each number of recomputed layers. A plan is made for five limits of
memory. The gap is how much longer a step is by the plan than by the best choice that fits, both as
an engine follows them from the first step on. Where the steps of a choice differ, the longest
counts, so that a gap may be a little below 0.

    python benchmarks/plan_search.py --pipelines 500 --json plans.json
    python benchmarks/plan_search.py --pipelines 200 --recompute --most-groups 5

Figures
    mean_gap, p95_gap, worst_gap   parts of a step, over all plans
    num_plans                      of pipelines and limits
    num_refused                    limits without a plan that one of all choices meets
    num_above                      plans whose peak is above their limit
    num_unmonotone                 plans that are slower than one of the same pipeline for less
    seconds_for_a_plan             median CPU time, of this machine

Each plan that is one of ``num_above`` or ``num_unmonotone``, or whose gap is above 1 %, is printed
with its seed and its limit. Pipelines with too few or too many groups are passed over.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, prod
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from command import parser_for, write_figures
from helpers.random_pipelines import Choice, choices, each_number, limits, planned

from pp_offload._groups import auto_bounds
from pp_offload.plan import InfeasibleError, choose
from pp_offload.plan.search import first_saved

NUM_LIMITS = 5

MAX_NUMBERS = 64
"""Of recomputed layers, of all ranks together."""

SAME = 1e-6

LARGE_GAP = 0.01
"""A plan is printed where its gap is above that."""


@dataclass(frozen=True)
class Row:
    """A plan, or none, beside the best choice for its limit."""

    seed: int
    limit_bytes: int
    gap: float
    is_refused: bool = False
    is_above: bool = False
    is_slower_than_for_less: bool = False
    seconds: float = 0.0

    @property
    def is_worth_a_line(self) -> bool:
        """Whether something is wrong with the plan."""
        return self.is_above or self.is_slower_than_for_less or self.gap > LARGE_GAP


def rows_of(seed: int, options: argparse.Namespace) -> Iterator[Row]:
    """The plans of one pipeline; none if it has too many choices."""
    drawn, tapes = planned(seed, layers="*" if options.recompute else None)
    num_numbers = prod(rank.num_layers + 1 for rank in tapes)
    num_groups = sum(len(first_saved(rank)) for rank in tapes)
    if not 2 <= num_groups <= options.most_groups or num_numbers > MAX_NUMBERS:
        return
    numbers = each_number(tapes) if options.recompute else [tapes]
    every = [choice for some in numbers for choice in choices(drawn, some)]
    fastest_s = inf
    for limit in sorted(limits(drawn, tapes, NUM_LIMITS)):  # all that leaves may need more
        best_s = best_followed(every, limit)
        how = drawn.order, tapes, drawn.hardware, limit
        begin_s = time.process_time()
        try:
            plan = choose(*how, config=drawn.config, peers=drawn.peers)
        except InfeasibleError:
            yield Row(seed, limit, 0.0, is_refused=best_s < inf)
            continue
        yield Row(
            seed,
            limit,
            gap=plan.seconds / best_s - 1,
            is_above=any(rank.peak_bytes > limit for rank in plan.ranks),
            is_slower_than_for_less=plan.seconds > fastest_s * (1 + SAME),
            seconds=time.process_time() - begin_s,
        )
        fastest_s = min(fastest_s, plan.seconds)


def best_followed(every: Sequence[Choice], limit_bytes: int) -> float:
    """The shortest time of those that fit, as an engine follows them. Few have to be followed."""
    best_s = inf
    for choice in sorted(every, key=lambda choice: choice.tried[1]):
        if choice.tried[1] >= best_s:
            break
        if choice.tried[0] <= limit_bytes:
            peak, seconds = choice.followed
            best_s = min(best_s, seconds) if peak <= limit_bytes else best_s
    return best_s


def figures(rows: list[Row]) -> dict[str, Any]:
    """Of all plans."""
    plans = [row for row in rows if row.seconds]
    gaps = sorted(row.gap for row in plans)
    return {
        "num_pipelines": len({row.seed for row in rows}),
        "num_plans": len(plans),
        "mean_gap": mean(gaps),
        "p95_gap": gaps[int(0.95 * len(gaps))],
        "worst_gap": gaps[-1],
        "num_refused": sum(row.is_refused for row in rows),
        "num_above": sum(row.is_above for row in rows),
        "num_unmonotone": sum(row.is_slower_than_for_less for row in rows),
        "seconds_for_a_plan": median(row.seconds for row in plans),
        "last_seed": rows[-1].seed,
    }


def main() -> None:
    """Measure, print, and write."""
    parser = parser_for(__doc__)
    parser.add_argument("--pipelines", type=int, default=100, help="default: 100")
    parser.add_argument("--most-groups", type=int, default=8, help="of a pipeline; default: 8")
    parser.add_argument("--recompute", action="store_true", help="layers may be recomputed")
    parser.add_argument("--seed", type=int, default=0, help="of the first; default: 0")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    auto_bounds.LEAST_IN_FLIGHT_BYTES = 1  # these models are small
    rows: list[Row] = []
    num, seed = 0, options.seed
    while num < (2 if options.quick else options.pipelines):
        new = list(rows_of(seed, options))
        seed, num, rows = seed + 1, num + bool(new), rows + new
        for row in new:
            if row.is_worth_a_line:
                print(row, flush=True)
        if new:
            write_figures(figures(rows), options.json)  # a run that is cut off leaves some
    for name, value in figures(rows).items():
        print(f"{name:20}{value:12.6g}")


if __name__ == "__main__":
    main()
