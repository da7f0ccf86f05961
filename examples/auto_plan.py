"""What the training of ``train_gpt.py`` keeps below a limit of memory, before it begins.

One microbatch of each stage is run on ``meta``; from that a plan is made that all ranks share.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
import torch.distributed as dist
from gpt import GPTConfig, Stage, loss_fn

from pp_offload import OffloadConfig
from pp_offload.plan import OffloadPlan, choose, record
from pp_offload.simulate import DEVICES, Modules, schedules

MIB = 2**20

CPU = replace(
    DEVICES["H100"],
    name="CPU",
    matmul_flops=5e10,
    memory_bytes_per_s=1e10,
    link_bytes_per_s=1e10,
    launch_s=0.0,
)
"""About a core. Where the device is the host there is no link; to copy takes time all the same."""


def shared_plan(options: argparse.Namespace, config: OffloadConfig) -> OffloadPlan:
    """The plan of the first rank, or why there is none. Collective."""
    plans: list[OffloadPlan | str | None] = [None]
    if dist.get_rank() == 0:
        try:
            plans = [make_plan(options, config)]
        except ValueError as failure:  # a limit that is too low, or a schedule with split backwards
            plans = [str(failure)]
    dist.broadcast_object_list(plans)
    plan = plans[0]
    if isinstance(plan, OffloadPlan):
        return plan
    raise SystemExit(f"--plan auto: {plan}" if dist.get_rank() == 0 else 1)


def make_plan(options: argparse.Namespace, config: OffloadConfig) -> OffloadPlan:
    """For all ranks."""
    num = options.stages * options.virtual_stages
    order = schedules.order_of(
        options.schedule,
        num_ranks=options.stages,
        stages_per_rank=options.virtual_stages,
        num_microbatches=options.microbatches,
    )
    model = GPTConfig(num_layers=options.layers, width=options.width, context=options.context)
    with torch.device("meta"):
        stages = [Stage(model, index, num) for index in range(num)]
        tokens = torch.empty(options.batch, options.context, dtype=torch.int64)
    work = Modules(
        stages,
        example=tokens,
        loss_fn=lambda logits: loss_fn(logits, tokens),
        groups={name: f"layers.*.{name}" for name in options.groups},
    )
    hardware = DEVICES["H100"] if options.device == "cuda" else CPU
    return choose(
        order,
        record(order, work, hardware, config),
        hardware,
        options.device_budget_mib * MIB,
        config=config,
        made_for=f"a byte-level GPT of {options.layers} layers, {options.schedule}",
    )
