"""Llama 3 on a pipeline of virtual GPUs, as the command line of an example asks for it."""

from __future__ import annotations

import argparse

import torch
from llama import SIZES, Stage, loss_fn
from schedules import SCHEDULES, V_SHAPED, check_schedule

from pp_offload.simulate import DEVICES, Modules, PeerLink, PipelineOrder, schedules

GIB, GB = 2**30, 10**9
GROUPS = ("attn", "mlp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is run, and on what."""
    add = parser.add_argument
    add("--model", choices=sorted(SIZES), default="8b", help="default: %(default)s")
    add("--device", choices=sorted(DEVICES), default="H100", help="default: H100")
    add(
        "--ranks",
        type=int,
        default=4,
        help="devices with stages of their own; default: %(default)s",
    )
    names = ", ".join(SCHEDULES)
    add("--schedule", default="1f1b", help=f"{names}, or a CSV file of actions; default: 1f1b")
    add("--virtual-stages", type=int, help="stages per rank; default 1, or 2 if it must be")
    add("--microbatches", type=int, default=16, help="of a step; default: %(default)s")
    add("--length", type=int, default=8192, help="tokens of a microbatch; default: %(default)s")
    add(
        "--groups", default="attn", help="leave of a layer: attn, mlp or both; default: %(default)s"
    )
    add("--network-gb", type=float, default=50.0, help="GB/s between two ranks; default: 50")
    add("--quick", action="store_true", help="a tiny model on two ranks, whatever the sizes given")


def check_arguments(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Say what cannot be, and leave ``options.groups`` as a list."""
    if options.quick:
        options.model, options.ranks, options.microbatches, options.length = "tiny", 2, 4, 1024
    options.groups = [name for name in options.groups.split(",") if name]
    if not options.groups or set(options.groups) - set(GROUPS):
        parser.error(f"--groups is {','.join(options.groups)!r}, expected attn, mlp or attn,mlp")
    check_schedule(parser, options)
    if options.ranks * options.virtual_stages > SIZES[options.model].num_layers:
        parser.error(f"there are {SIZES[options.model].num_layers} layers, fewer than stages")
    try:
        order_of(options)
    except ValueError as failure:
        parser.error(str(failure))


def title_of(options: argparse.Namespace) -> str:
    """In words."""
    shape = "a V" if options.schedule in V_SHAPED else f"{options.virtual_stages} stages each"
    return (
        f"Llama {options.model} on {options.ranks} virtual {options.device}, {options.schedule}, "
        f"{shape if options.virtual_stages > 1 else 'a stage each'}, {options.microbatches} "
        f"microbatches of {options.length} tokens; {' and '.join(options.groups)} may leave"
    )


def model_of(options: argparse.Namespace) -> Modules:
    """The stages of all ranks."""
    num = options.ranks * options.virtual_stages
    groups, length = options.groups, options.length
    config = SIZES[options.model]
    stages = [Stage(config, i, num, length=length, groups=groups) for i in range(num)]
    tokens = torch.empty(1, length, dtype=torch.int64, device="meta")
    targets = torch.empty_like(tokens)
    return Modules(
        stages,
        example=tokens,
        loss_fn=lambda logits: loss_fn(logits, targets),
        layers="layers.*",
    )


def order_of(options: argparse.Namespace) -> PipelineOrder:
    """Who does what, and when."""
    return schedules.order_of(
        options.schedule,
        num_ranks=options.ranks,
        stages_per_rank=options.virtual_stages,
        num_microbatches=options.microbatches,
    )


def peers_of(options: argparse.Namespace) -> PeerLink:
    """How messages pass."""
    return PeerLink(bytes_per_s=options.network_gb * GB)


def min_numel_of(options: argparse.Namespace) -> int:
    """Smaller tensors stay."""
    return 1024 if options.quick else 2**20
