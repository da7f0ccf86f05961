"""Plans beside the best of all choices of groups, on random pipelines, and what they cost to find.

For each pipeline with few groups every choice is predicted; a plan is made for several limits of
memory. The gap is how much longer a step is by the plan than by the best choice that fits, both as
an engine follows them from the first step on. Where the steps of a choice differ, the longer one of
those that were predicted counts, so that a gap may be a little below 0.

    python benchmarks/plan_search.py --pipelines 500 --json plans.json
    python benchmarks/plan_search.py --pipelines 200 --recompute --most-groups 6
    python benchmarks/plan_search.py --different 1000 --part 0.5

With ``--recompute``, layers may be recomputed, and every number of them is predicted, too.

Figures
    mean_gap, p95_gap, worst_gap   parts of a step, over all plans
    num_plans                      of pipelines and limits
    num_refused                    limits without a plan that one of all choices meets
    num_above                      plans whose peak is above their limit
    num_unmonotone                 plans that are slower than one of the same pipeline for less
    seconds_for_a_plan             median CPU time, of this machine
    last_seed                      of these pipelines; those whose groups are too few or too many
                                   are passed over

Each plan that is one of ``num_above`` or ``num_unmonotone``, or whose gap is above 1 %, is printed
with its seed and its limit.

With ``--different``, one plan is made for one rank with so many groups, no two of which are equal,
and two microbatches: for a limit that is ``--part`` of the way from the peak where all groups leave
to that without offload.

Figures
    num_steps                      that were predicted
    choose_s                       CPU time
    gap_to_bound                   to a step without offload, which no plan is below
    room_left                      part of the limit that is above the peak
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
from every_choice import best_followed, choices, each_number, num_groups
from many_groups import limit_between, many_groups
from small import limits, planned

from pp_offload._groups import auto_bounds
from pp_offload.plan import InfeasibleError, choose

NUM_LIMITS = 5

MAX_NUMBERS = 64
"""Of recomputed layers, of all ranks together."""

SAME = 1e-6

LARGE_GAP = 0.01
"""A plan is printed where its gap is above that."""


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pipelines", type=int, default=100, help="default: 100")
    parser.add_argument("--most-groups", type=int, default=8, help="of a pipeline; default: 8")
    parser.add_argument("--recompute", action="store_true", help="layers may be recomputed")
    parser.add_argument("--seed", type=int, default=0, help="of the first; default: 0")
    parser.add_argument("--different", type=int, help="groups of one rank, in place of pipelines")
    parser.add_argument("--part", type=float, default=0.5, help="where its limit is; default: 0.5")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if options.different is None:
        figures = of_pipelines(options)
    else:
        figures = of_different(options.different, options.part)
    for name, value in figures.items():
        print(f"{name:20}{value:12.6g}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def of_different(num: int, part: float) -> dict[str, Any]:
    """Of one rank whose groups all differ."""
    drawn, tapes = many_groups(num)
    limit = limit_between(drawn, tapes, part)
    predicted: list[int] = []
    begin_s = time.process_time()
    plan = choose(drawn.order, tapes, drawn.hardware, limit, progress=predicted.append)
    choose_s = time.process_time() - begin_s
    return {
        "num_groups": num,
        "part": part,
        "num_steps": len(predicted),
        "choose_s": choose_s,
        "gap_to_bound": plan.seconds / plan.least_seconds - 1,
        "room_left": 1 - plan.ranks[0].peak_bytes / limit,
    }


def of_pipelines(options: argparse.Namespace) -> dict[str, Any]:
    """Of random ones, beside all choices."""
    auto_bounds.LEAST_IN_FLIGHT_BYTES = 1  # these models are small
    gaps: list[float] = []
    took: list[float] = []
    num_refused = num_above = num_unmonotone = num_done = 0
    seed = options.seed
    while num_done < options.pipelines:
        drawn, tapes = planned(seed, layers="*" if options.recompute else None)
        seed += 1
        num_numbers = prod(one.num_layers + 1 for one in tapes)
        if not 2 <= num_groups(tapes) <= options.most_groups or num_numbers > MAX_NUMBERS:
            continue
        num_done += 1
        numbers = each_number(tapes) if options.recompute else [tapes]
        every = [one for some in numbers for one in choices(drawn, some)]
        fastest = float("inf")
        for limit in sorted(limits(drawn, tapes, NUM_LIMITS)):  # all that leaves may need more
            best = best_followed(every, limit)
            begin = time.process_time()
            try:
                plan = choose(
                    *(drawn.order, tapes, drawn.hardware, limit),
                    config=drawn.config,
                    peers=drawn.peers,
                )
            except InfeasibleError:
                num_refused += best < float("inf")
                continue
            took.append(time.process_time() - begin)
            gaps.append(plan.seconds / best - 1)
            is_above = any(rank.peak_bytes > limit for rank in plan.ranks)
            is_slower = plan.seconds > fastest * (1 + SAME)
            num_above += is_above
            num_unmonotone += is_slower
            fastest = min(fastest, plan.seconds)
            if is_above or is_slower or gaps[-1] > LARGE_GAP:
                said = " above" * is_above + " slower than for less" * is_slower
                print(f"seed {seed - 1}, limit {limit}: gap {gaps[-1]:.4%}{said}", flush=True)
    gaps.sort()
    return {
        "num_pipelines": num_done,
        "num_plans": len(gaps),
        "mean_gap": mean(gaps),
        "p95_gap": gaps[int(0.95 * len(gaps))],
        "worst_gap": gaps[-1],
        "num_refused": num_refused,
        "num_above": num_above,
        "num_unmonotone": num_unmonotone,
        "seconds_for_a_plan": median(took),
        "last_seed": seed - 1,
    }


if __name__ == "__main__":
    main()
