"""One rank with many groups, no two of which are equal."""

from __future__ import annotations

from random import Random

import torch
from random_pipelines import Drawn
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe

from pp_offload import OffloadConfig
from pp_offload.plan import RankTapes, predict, record
from pp_offload.simulate import DEVICES, Modules, PeerLink, PipelineOrder

NUM_MICROBATCHES = 2


def many_groups(num: int, *, in_order: bool = False) -> tuple[Drawn, list[RankTapes]]:
    """A stage of so many layers, each of which is a group, and its tape.

    Widths are from 4,096 to 12,288. They are in no order, so that small groups are everywhere in a
    forward, or the largest are the last.
    """
    widths = [4096 + 8 * round(1024 * index / num) for index in range(num + 1)]
    if not in_order:
        Random(0).shuffle(widths)
    with torch.device("meta"):
        layers = [nn.Linear(*both).bfloat16() for both in zip(widths, widths[1:], strict=False)]
        example = torch.empty(4096, widths[0], dtype=torch.bfloat16)
    work = Modules(
        [nn.Sequential(*layers)],
        example=example,
        loss_fn=lambda y: y.float().square().mean(),
        groups={"linear": "*"},
    )
    order = PipelineOrder(
        ScheduleGPipe, num_ranks=1, num_stages=1, num_microbatches=NUM_MICROBATCHES
    )
    config = OffloadConfig(rematerialize="none")  # else what leaves costs compute
    drawn = Drawn(order, work, DEVICES["H100"], PeerLink(), config, num_steps=2)
    return drawn, record(order, work, drawn.hardware, drawn.config)


def limit_between(drawn: Drawn, tapes: list[RankTapes], part: float = 0.5) -> int:
    """So far from the peak where all leaves to that where nothing does."""
    how = drawn.order, tapes, drawn.hardware
    most = predict(*how, num_steps=1).ranks[0].peak_bytes
    least = predict(*how, config=drawn.config).ranks[0].peak_bytes
    return least + int((most - least) * part)
