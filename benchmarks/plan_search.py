"""Plans beside the best of all choices of groups, on random pipelines, and what they cost to find.

For each pipeline with few groups every choice is predicted; a plan is made for several limits of
memory. The gap is how much longer a step is by the plan than by the best choice that fits, both as
an engine follows them from the first step on. Where the steps of a choice differ, the longer one of
those that were predicted counts, so that a gap may be a little below 0.

    python benchmarks/plan_search.py --pipelines 500 --json plans.json
    python benchmarks/plan_search.py --pipelines 500 --tries 100
    python benchmarks/plan_search.py --pipelines 200 --recompute --most-groups 6
    python benchmarks/plan_search.py --different 1000 --part 0.5

With ``--recompute``, layers may be recomputed, and every number of them is predicted, too. With
``--tries``, a plan has to be found with that many: all choices are tried where they are few, and
of a large model they are not.

Figures
    mean_gap, p95_gap, worst_gap   parts of a step, over all plans
    num_plans                      of pipelines and limits
    num_above                      plans whose peak is above their limit
    num_unmonotone                 plans that are slower than one of the same pipeline for less
    seconds_for_a_plan             median, of this machine
    last_seed                      of these pipelines; those whose groups are too few or too many
                                   are passed over

Each plan that is one of ``num_above`` or ``num_unmonotone``, or whose gap is above 1 %, is printed
with its seed and its limit.

With ``--different``, one plan is made for one rank with so many groups, no two of which are equal,
and two microbatches: for a limit that is ``--part`` of the way from the peak where all groups leave
to that without offload.

Figures
    num_steps                      that were predicted
    choose_s, predictions_s        CPU time of the choice, and of the predictions in it
    others_s                       of all else in it
    gap_to_bound                   to a step without offload, which no plan is below
    room_left                      part of the limit that is above the peak
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "plan"))
from every_choice import best_followed, choices, each_number, num_groups
from many_groups import limit_between, many_groups
from small import limits, planned

from pp_offload._groups import auto_bounds
from pp_offload.plan import InfeasibleError, choose, steps
from pp_offload.plan.steps import MAX_TRIES, Steps

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
    parser.add_argument("--tries", type=int, default=MAX_TRIES, help="for a plan, at most")
    parser.add_argument("--seed", type=int, default=0, help="of the first; default: 0")
    parser.add_argument("--different", type=int, help="groups of one rank, in place of pipelines")
    parser.add_argument("--part", type=float, default=0.5, help="where its limit is; default: 0.5")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    steps.MAX_TRIES = options.tries
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
    predicted: list[float] = []
    with timed(predicted):
        begin_s = time.process_time()
        plan = choose(drawn.order, tapes, drawn.hardware, limit)
        choose_s = time.process_time() - begin_s
    return {
        "num_groups": num,
        "part": part,
        "num_steps": len(predicted),
        "choose_s": choose_s,
        "predictions_s": sum(predicted),
        "others_s": choose_s - sum(predicted),
        "gap_to_bound": plan.seconds / plan.least_seconds - 1,
        "room_left": 1 - plan.ranks[0].peak_bytes / limit,
    }


@contextmanager
def timed(took: list[float]) -> Iterator[None]:
    """Meanwhile it is noted how long each predicted step takes."""
    with ExitStack() as stack:
        for name in ("without_offload", "first", "planned", "followed"):
            stack.enter_context(patch.object(Steps, name, _noting(getattr(Steps, name), took)))
        yield


def _noting(predicts: Callable[..., Any], took: list[float]) -> Callable[..., Any]:
    def predict(*args: Any) -> Any:
        begin_s = time.process_time()
        step = predicts(*args)
        took.append(time.process_time() - begin_s)
        return step

    return predict


def of_pipelines(options: argparse.Namespace) -> dict[str, Any]:
    """Of random ones, beside all choices."""
    auto_bounds.LEAST_IN_FLIGHT_BYTES = 1  # these models are small
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
        numbers = each_number(tapes) if options.recompute else [tapes]
        every = [one for some in numbers for one in choices(drawn, some)]
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
            gaps.append(plan.seconds / best_followed(every, limit) - 1)
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
        "num_above": num_above,
        "num_unmonotone": num_unmonotone,
        "seconds_for_a_plan": median(took),
        "last_seed": seed - 1,
    }


if __name__ == "__main__":
    main()
