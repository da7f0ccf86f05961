"""From which length on copies hide behind compute, beside MEMO (arXiv 2407.12117, figure 1b).

There a GPT of 7B is split over 8 A800 by tensor and sequence parallelism, and what a layer saves
leaves within the forward of a layer from 192K tokens on. Here the slice of a layer that one device
has is recorded: an eighth of the heads and of the MLP, and an eighth of the tokens where norms and
residuals are. An A800 computes as an A100 does, whose products reach 0.6 of their peak.

    python benchmarks/validate_memo.py
    python benchmarks/validate_memo.py --quick

Collectives take no time here.

Figures, by the rate of a device's link in GB/s
    thousands         of tokens (1,024 each), the least whole number for which copies take no longer
    forward_ms        of a layer, at that length
    bytes_a_token     that the slice of a layer saves, of each unit of the hidden size
"""

from __future__ import annotations

import argparse
import json
import logging
from bisect import bisect_left
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.pipelining import Schedule1F1B
from torch.nn import functional as F

from pp_offload import OffloadConfig
from pp_offload.plan import GroupProfile, profile, record
from pp_offload.simulate import DEVICES, Hardware, Modules, PipelineOrder

GB = 10**9
THEIRS = 192
"""Thousands of tokens."""

WIDTH, HEAD_WIDTH, NUM_DEVICES = 4096, 128, 8
NUM_HEADS = WIDTH // HEAD_WIDTH // NUM_DEVICES
RATES_GB = (25.0, 12.5)
"""A link of PCIe 4.0 for each device, and one for two of them."""


class Columns(torch.autograd.Function):
    """A product of all tokens with some columns. A device saves its own, and gathers them anew."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return gathered(x) @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return scattered(gradient @ weight), gradient.t() @ gathered(x)


class Scattered(torch.autograd.Function):
    """Sums of all devices, of which each keeps those of its tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return scattered(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gathered(gradient)


def gathered(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0] * NUM_DEVICES, *x.shape[1:])


def scattered(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0] // NUM_DEVICES, *x.shape[1:])


class Slice(nn.Module):
    """Of a layer of a GPT, for tokens of one device."""

    def __init__(self) -> None:
        super().__init__()
        part = WIDTH // NUM_DEVICES
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Parameter(torch.empty(3 * part, WIDTH))
        self.up = nn.Parameter(torch.empty(4 * part, WIDTH))
        self.out = nn.Linear(part, WIDTH, bias=False)
        self.down = nn.Linear(4 * part, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = Columns.apply(self.first(x), self.qkv).view(1, -1, 3, NUM_HEADS, HEAD_WIDTH)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind()
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + Scattered.apply(self.out(y.transpose(1, 2).flatten(0, 1).flatten(1)))
        inner = F.gelu(Columns.apply(self.second(x), self.up))
        return x + Scattered.apply(self.down(inner))


def layer(thousands: int, hardware: Hardware) -> GroupProfile:
    """The profile of a slice with so many thousands of tokens."""
    num_tokens = thousands * 1024 // NUM_DEVICES
    with torch.device("meta"):
        work = Modules(
            [nn.Sequential(Slice()).bfloat16()],
            example=torch.empty(num_tokens, WIDTH, dtype=torch.bfloat16),
            loss_fn=lambda y: y.float().square().mean(),
            groups={"layer": "*"},
        )
    order = PipelineOrder(Schedule1F1B, num_ranks=1, num_stages=1, num_microbatches=2)
    options = OffloadConfig(rematerialize="none")  # as theirs, which copies all
    return profile(record(order, work, hardware, options), hardware).groups[0]


LEAST, MOST = 8, 1024
"""Thousands of tokens that are looked at. Of fewer, some tensors are too small to leave."""


def hidden_from(hardware: Hardware) -> int:
    """The least number of thousands for which copies take no longer than compute."""
    return LEAST + bisect_left(
        range(LEAST, MOST),
        True,
        key=lambda k: (one := layer(k, hardware)).copy_ms <= one.forward_ms,
    )


def main() -> None:
    """Compute, and print both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a fast link alone")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    found = {}
    for rate_gb in [100.0] if options.quick else RATES_GB:
        hardware = replace(DEVICES["A100"], link_bytes_per_s=rate_gb * GB)
        thousands = hidden_from(hardware)
        one = layer(thousands, hardware)
        found[f"{rate_gb:g}"] = {
            "thousands": thousands,
            "forward_ms": one.forward_ms,
            "bytes_a_token": one.nbytes / (thousands * 1024 * WIDTH),
        }
        print(
            f"link {rate_gb:5.1f} GB/s: from {thousands}K tokens on, theirs {THEIRS}K; "
            f"{one.forward_ms:.0f} ms a layer, {one.nbytes / 2**30:.2f} GiB"
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
