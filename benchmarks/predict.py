"""What it costs to predict a step of many ranks: CPU time for all that happens in it.

Stages are equal, each a few linear layers, every one a group. The first one, one in the middle and
the last one are recorded; all others in the middle are like that one.

    python benchmarks/predict.py --ranks 64 --microbatches 256
    python benchmarks/predict.py --ranks 16 --microbatches 64 --json predict.json

Figures
    num_events            of all tapes that are played for a step
    without_offload_s     CPU time of predict() for a step in which nothing leaves
    two_steps_s           of predict() with default options: a step that teaches, and the next one
    us_for_an_event       of two_steps_s
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

from pp_offload import OffloadConfig
from pp_offload.plan import RankTapes, predict, record
from pp_offload.simulate import DEVICES, Modules, PipelineOrder

WIDTH = 4096
NUM_REPEATS = 3


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=16, help="at least 3; default: 16")
    parser.add_argument("--microbatches", type=int, default=64, help="default: 64")
    parser.add_argument("--groups", type=int, default=1, help="of each stage; default: 1")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    tapes = tapes_of(options.ranks, options.microbatches, options.groups)
    order = order_of(options.ranks, options.microbatches)
    how, config = (order, tapes, DEVICES["H100"]), OffloadConfig()
    num_events = options.microbatches * sum(
        tape.num_events for one in tapes for tape in one.stages.values()
    )
    two_steps_s = seconds(lambda: predict(*how, config=config))
    figures = {
        "num_events": num_events,
        "without_offload_s": seconds(lambda: predict(*how, num_steps=1)),
        "two_steps_s": two_steps_s,
        "us_for_an_event": two_steps_s / (2 * num_events) * 1e6,
    }
    for name, figure in figures.items():
        print(f"{name:18}  {figure:10.6g}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def order_of(num_ranks: int, num_microbatches: int) -> PipelineOrder:
    """Of 1F1B, with a stage for each rank."""
    return PipelineOrder(
        Schedule1F1B, num_ranks=num_ranks, num_stages=num_ranks, num_microbatches=num_microbatches
    )


def tapes_of(num_ranks: int, num_microbatches: int, num_groups: int) -> list[RankTapes]:
    """Of all ranks, from those of three."""
    with torch.device("meta"):
        stages = [
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_groups))).bfloat16()
            for _ in range(3)
        ]
        example = torch.empty(WIDTH, WIDTH, dtype=torch.bfloat16)
    work = Modules(
        stages,
        example=example,
        loss_fn=lambda y: y.float().square().mean(),
        groups={"linear": "*"},
    )
    recorded = record(order_of(3, num_microbatches), work, DEVICES["H100"])
    stage_of = [0, *[1] * (num_ranks - 2), 2]
    return [
        replace(recorded[like], stages={rank: recorded[like].stages[like]}, variant=None)
        for rank, like in enumerate(stage_of)
    ]


def seconds(act: Callable[[], object]) -> float:
    """CPU time, the least of some times."""
    took = []
    for _ in range(NUM_REPEATS):
        begin_s = time.process_time()
        act()
        took.append(time.process_time() - begin_s)
    return min(took)


if __name__ == "__main__":
    main()
