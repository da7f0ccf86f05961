"""What ``device_limit_bytes`` does, beside a plan that knows the machine.

A pipeline of GPT stages on virtual H100. From what is needed where all groups leave to what a step
needs without offload, some limits: an engine that plans for itself, step by step, and the plan of
``choose``, which the engine follows from the second step on.

    python benchmarks/auto_plan.py --json auto.json

Figures, a row for each limit
    limit_gib, all_gib, none_gib   the limit; the highest peak where all leaves, and without offload
    auto_gib, plan_gib             the highest peak of any rank in the last step
    most_gib                       the highest peak of any step of the automatic plan
    auto_ratio, plan_ratio         a step to one without offload
    auto_sent_gib, plan_sent_gib   bytes that leave in a step, of all ranks
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch.distributed.pipelining import Schedule1F1B
from virtual_models import Stage

from pp_offload import OffloadConfig
from pp_offload.plan import Chooser, InfeasibleError, RankTapes, predict, record
from pp_offload.simulate import DEVICES, Modules, PipelineOrder, PipelineStep, run_pipeline

GIB = 2**30
HARDWARE = DEVICES["H100"]
PARTS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Of the way from the least to the most."""

STEPS = (4, 5, 7, 10)
"""After so many the automatic plan is looked at."""


def pipeline(num_ranks: int, num_layers: int, width: int) -> tuple[PipelineOrder, Modules]:
    """Stages of so many layers, 4,096 tokens a microbatch."""
    stages = [Stage("gpt", width, 4096, num_layers) for _ in range(num_ranks)]
    work = Modules(
        stages,
        example=torch.empty(1, 4096, width, dtype=torch.bfloat16, device="meta"),
        loss_fn=lambda y: y.float().square().mean(),
        groups={"attn": "layers.*.attn", "mlp": "layers.*.mlp"},
    )
    sizes = {"num_ranks": num_ranks, "num_stages": num_ranks, "num_microbatches": 4 * num_ranks}
    return PipelineOrder(Schedule1F1B, **sizes), work


def peak_gib(step: PipelineStep) -> float:
    return max(rank.peak_bytes for rank in step.ranks) / GIB


def sent_gib(step: PipelineStep) -> float:
    return sum(rank.bytes_offloaded for rank in step.ranks) / GIB


class Rows:
    """Makes a row for a limit."""

    def __init__(self, order: PipelineOrder, work: Modules, tapes: list[RankTapes]) -> None:
        self.order, self.work, self.tapes = order, work, tapes
        self.none = predict(order, tapes, HARDWARE, num_steps=1)
        self.all = predict(order, tapes, HARDWARE, config=OffloadConfig())
        self.chooser = Chooser(order, tapes, HARDWARE)

    def row(self, part: float) -> dict[str, Any]:
        low, high = peak_gib(self.all), peak_gib(self.none)
        limit = int((low + (high - low) * part) * GIB)
        config = OffloadConfig(device_limit_bytes=limit)
        steps = [
            run_pipeline(self.order, self.work, HARDWARE, config=config, num_steps=num)
            for num in STEPS
        ]
        auto, planned = steps[-1], self._planned(limit)
        return {
            "limit_gib": limit / GIB,
            "all_gib": low,
            "none_gib": high,
            "auto_gib": peak_gib(auto),
            "most_gib": max(map(peak_gib, steps)),
            "plan_gib": None if planned is None else peak_gib(planned),
            "auto_ratio": auto.seconds / self.none.seconds,
            "plan_ratio": None if planned is None else planned.seconds / self.none.seconds,
            "auto_sent_gib": sent_gib(auto),
            "plan_sent_gib": None if planned is None else sent_gib(planned),
        }

    def _planned(self, limit: int) -> PipelineStep | None:
        try:
            plan = self.chooser.plan(limit)
        except InfeasibleError:
            return None
        return predict(self.order, self.tapes, HARDWARE, config=OffloadConfig(plan=plan))


def main() -> None:
    """Run, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, help="default: 4")
    parser.add_argument("--layers", type=int, default=8, help="of a rank; default: 8")
    parser.add_argument("--width", type=int, default=6144, help="default: 6144")
    parser.add_argument("--quick", action="store_true", help="two ranks of two layers, one limit")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if options.quick:
        options.ranks, options.layers = 2, 2
    order, work = pipeline(options.ranks, options.layers, options.width)
    rows = Rows(order, work, record(order, work, HARDWARE))
    parts = PARTS[2:3] if options.quick else PARTS
    found = []
    print(
        f"{options.ranks} ranks of {options.layers} GPT layers, width {options.width}; GiB, and "
        f"steps to those without offload\n\n{'limit':>7}{'all':>7}{'none':>7}"
        f"{'auto':>8}{'most':>7}{'step':>7}{'sent':>7}{'plan':>9}{'step':>7}{'sent':>7}"
    )
    for part in parts:
        row = rows.row(part)
        found.append(row)
        cells = [
            (row[name], width)
            for name, width in (
                ("limit_gib", 7),
                ("all_gib", 7),
                ("none_gib", 7),
                ("auto_gib", 8),
                ("most_gib", 7),
                ("auto_ratio", 7),
                ("auto_sent_gib", 7),
                ("plan_gib", 9),
                ("plan_ratio", 7),
                ("plan_sent_gib", 7),
            )
        ]
        print("".join(f"{'-' if one is None else f'{one:.2f}':>{width}}" for one, width in cells))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
