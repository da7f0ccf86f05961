"""Predicted steps beside those that PipeOffload has measured (arXiv 2503.01328, figure 1).

There all activations leave on 8 pipeline ranks with 32 microbatches of one sequence, on A100 whose
products reach 220 TFLOP/s and whose links reach 15 GB/s; it says how much longer a step is than one
without offload. Here a transformer of those sizes is recorded, and the same is predicted.

    python benchmarks/validate_pipeoffload.py
    python benchmarks/validate_pipeoffload.py --fit          # with another rate of the link
    python benchmarks/validate_pipeoffload.py --quick

The last rank keeps all here: with one microbatch in flight, what leaves is wanted back at once.

Figures
    theirs, ours    slow-down in percent, by hidden size and thousands of tokens
    rmse            of the differences, in points
    link_gb         the rate that was used, in GB/s; with --fit the one with the least rmse
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from math import inf, sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B
from torch.nn import functional as F

from pp_offload import OffloadConfig
from pp_offload.plan import OffloadPlan, RankPlan, RankTapes, predict, record
from pp_offload.simulate import Hardware, Modules, PipelineOrder

GB = 10**9
THEIRS = {
    4096: {4: 31.1, 8: 20.0, 16: 6.2, 32: -7.4},
    5120: {4: 15.0, 8: 6.9, 16: 0.2, 32: -3.8},
    6144: {4: 2.9, 8: 0.5, 16: 0.3, 32: 0.2},
}
"""By hidden size and thousands of tokens, in percent."""

NUM_RANKS, NUM_MICROBATCHES, HEAD_WIDTH = 8, 32, 128
LINK_GB = 15.0


class Layer(nn.Module):
    """Of a GPT: attention over all heads, and an MLP four times as wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD_WIDTH
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1).unbind(2)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Case:
    """A hidden size and a length."""

    def __init__(self, width: int, length: int, layers: int) -> None:
        with torch.device("meta"):
            stages = [
                nn.Sequential(*(Layer(width) for _ in range(layers))).bfloat16()
                for _ in range(NUM_RANKS)
            ]
            example = torch.empty(1, length, width, dtype=torch.bfloat16)
        work = Modules(
            stages,
            example=example,
            loss_fn=lambda y: y.float().square().mean(),
            groups={"layer": "*"},
        )
        self.order = PipelineOrder(
            Schedule1F1B,
            num_ranks=NUM_RANKS,
            num_stages=NUM_RANKS,
            num_microbatches=NUM_MICROBATCHES,
        )
        options = OffloadConfig(rematerialize="none")  # as theirs, which copies all
        self.tapes = record(self.order, work, device(LINK_GB), options)
        self.config = replace(options, plan=all_leave(self.tapes))
        self.none_s = predict(self.order, self.tapes, device(LINK_GB), num_steps=1).seconds

    def slowdown(self, link_gb: float) -> float:
        """In percent."""
        with_it = predict(self.order, self.tapes, device(link_gb), config=self.config)
        return (with_it.seconds / self.none_s - 1) * 100


def all_leave(tapes: Sequence[RankTapes]) -> OffloadPlan:
    """From all ranks but the last."""
    *others, last = tapes
    ranks = [RankPlan(one.planned(stay=())) for one in others]
    places = [(stage, i) for stage, tape in last.stages.items() for i in range(len(tape.groups))]
    ranks.append(RankPlan(last.planned(stay=places)))
    return OffloadPlan("all leave", 0, 0.0, 0.0, tuple(ranks))


def device(link_gb: float) -> Hardware:
    """All that computes is products."""
    return Hardware(
        name="A100 as measured",
        matmul_flops=220e12,
        matmul_fraction=1.0,
        memory_bytes_per_s=inf,
        memory_bytes=2**50,
        link_bytes_per_s=link_gb * GB,
    )


def figures(cases: dict[tuple[int, int], Case], link_gb: float) -> dict[str, Any]:
    """With that rate."""
    ours = {key: case.slowdown(link_gb) for key, case in cases.items()}
    wrong = [one - THEIRS[width][length] for (width, length), one in ours.items()]
    return {
        "link_gb": link_gb,
        "rmse": sqrt(sum(one * one for one in wrong) / len(wrong)),
        "ours": {f"h {width}, {length}K": round(one, 1) for (width, length), one in ours.items()},
        "theirs": {f"h {width}, {length}K": THEIRS[width][length] for width, length in ours},
    }


def main() -> None:
    """Predict, and print both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fit", action="store_true", help="the rate with the least error")
    parser.add_argument("--layers", type=int, default=4, help="of each rank; default: 4")
    parser.add_argument("--quick", action="store_true", help="two lengths of one size")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    keys = [(width, length) for width, row in THEIRS.items() for length in row]
    if options.quick:
        keys, options.layers = [(4096, 4), (4096, 16)], 1
    cases = {key: Case(key[0], key[1] * 1024, options.layers) for key in keys}
    rates = range(15, 23) if options.fit else [LINK_GB]
    found = min((figures(cases, float(rate)) for rate in rates), key=lambda one: one["rmse"])
    print(f"link {found['link_gb']:.1f} GB/s, RMSE {found['rmse']:.2f} points")
    for key, ours in found["ours"].items():
        print(f"{key:>12}  theirs {found['theirs'][key]:6.1f}  ours {ours:6.1f}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
