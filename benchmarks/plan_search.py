"""Plans beside the best of all choices of groups, on random pipelines, and what they cost to find.

For each pipeline with few groups every choice is predicted; a plan is made for several limits of
memory. The gap is how much longer a step is by the plan than by the best choice that fits.

    python benchmarks/plan_search.py --pipelines 500 --json plans.json
    python benchmarks/plan_search.py --pipelines 500 --tries 100
    python benchmarks/plan_search.py --pipelines 200 --recompute --most-groups 6

With ``--recompute``, layers may be recomputed, and every number of them is predicted, too. With
``--tries``, a plan has to be found with that many: all choices are tried where they are few, and
of a large model they are not.

Figures
    mean_gap, p95_gap, worst_gap   parts of a step, over all plans
    num_plans                      of pipelines and limits
    num_above                      plans whose peak is above their limit
    num_unmonotone                 plans that are slower than one of the same pipeline for less
    seconds_for_a_plan             median, of this machine
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from math import prod
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "plan"))
from every_choice import all_choices, every_number_and_choice, num_groups
from small import limits, planned

from pp_offload._groups import auto_bounds
from pp_offload.plan import InfeasibleError, choose, steps
from pp_offload.plan.steps import MAX_TRIES

NUM_LIMITS = 5

MAX_NUMBERS = 64
"""Of recomputed layers, of all ranks together."""

SAME = 1e-6


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pipelines", type=int, default=100, help="default: 100")
    parser.add_argument("--most-groups", type=int, default=8, help="of a pipeline; default: 8")
    parser.add_argument("--recompute", action="store_true", help="layers may be recomputed")
    parser.add_argument("--tries", type=int, default=MAX_TRIES, help="for a plan, at most")
    parser.add_argument("--seed", type=int, default=0, help="of the first; default: 0")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    auto_bounds.LEAST_IN_FLIGHT_BYTES = 1  # these models are small
    steps.MAX_TRIES = options.tries
    gaps: list[float] = []
    took: list[float] = []
    num_above = num_unmonotone = num_done = 0
    seed = options.seed
    while num_done < options.pipelines:
        drawn, tapes = planned(seed, layers="*" if options.recompute else None)
        seed += 1
        num_numbers = prod(one.num_layers + 1 for one in tapes)
        if not 2 <= num_groups(tapes) <= options.most_groups or num_numbers > MAX_NUMBERS:
            continue
        num_done += 1
        every = list((every_number_and_choice if options.recompute else all_choices)(drawn, tapes))
        fastest = float("inf")
        for limit in sorted(limits(drawn, tapes, NUM_LIMITS)):  # all that leaves may need more
            begin = time.perf_counter()
            try:
                plan = choose(
                    *(drawn.order, tapes, drawn.hardware, limit),
                    config=drawn.config,
                    peers=drawn.peers,
                )
            except InfeasibleError:
                continue
            took.append(time.perf_counter() - begin)
            best = min(seconds for peak, seconds in every if peak <= limit)
            gaps.append(plan.seconds / best - 1)
            num_above += any(rank.peak_bytes > limit for rank in plan.ranks)
            num_unmonotone += plan.seconds > fastest * (1 + SAME)
            fastest = min(fastest, plan.seconds)
    gaps.sort()
    figures: dict[str, Any] = {
        "num_pipelines": num_done,
        "num_plans": len(gaps),
        "mean_gap": mean(gaps),
        "p95_gap": gaps[int(0.95 * len(gaps))],
        "worst_gap": gaps[-1],
        "num_above": num_above,
        "num_unmonotone": num_unmonotone,
        "seconds_for_a_plan": median(took),
    }
    for name, value in figures.items():
        print(f"{name:20}{value:12.6g}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
