"""A step of Llama 3 on a pipeline of virtual GPUs, without and with activation offload.

python examples/simulate_llama.py                              # 8B on four H100, 1F1B
python examples/simulate_llama.py --groups attn,mlp --gib 3    # more leaves, further ahead
python examples/simulate_llama.py --model 70b --ranks 8 --length 4096
python examples/simulate_llama.py --schedule interleaved1f1b --virtual-stages 2
python examples/simulate_llama.py --trace out.json.gz          # for https://ui.perfetto.dev
python examples/simulate_llama.py --trace out.json.gz --picture out.png

The engine runs as it is, once for each rank, on tensors without data and streams with clocks: no
GPU and no memory is needed, and no time is measured. Of the device's memory, parameters, gradients
and activations count; an optimizer's state does not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from llama import SIZES, Stage, loss_fn
from picture_flag import check_picture
from schedules import SCHEDULES, V_SHAPED, check_schedule

from pp_offload import OffloadConfig
from pp_offload.simulate import DEVICES, Modules, PeerLink, PipelineOrder, schedules
from pp_offload.simulate.compare import Comparison, compare
from pp_offload.trace import Trace, read
from pp_offload.trace.picture import draw

GIB, GB = 2**30, 10**9
BAR_WIDTH = 40
GROUPS = ("attn", "mlp")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=sorted(SIZES), default="8b", help="default: 8b")
    add("--device", choices=sorted(DEVICES), default="H100", help="default: H100")
    add("--ranks", type=int, default=4, help="devices, of which each has its stages; default: 4")
    names = ", ".join(SCHEDULES)
    add("--schedule", default="1f1b", help=f"{names}, or a CSV file of actions; default: 1f1b")
    add("--virtual-stages", type=int, help="stages per rank; default 1, or 2 if it must be")
    add("--microbatches", type=int, default=16, help="of a step; default: 16")
    add("--length", type=int, default=8192, help="tokens of a microbatch; default: 8192")
    add("--groups", default="attn", help="what leaves of a layer: attn, mlp or both; default: attn")
    add("--fraction", type=float, default=1.0, help="of a stage's groups, that leaves; default: 1")
    add("--gib", type=float, help="may be on its way in each direction; default: the engine's own")
    add("--host-gib", type=float, help="host memory of a rank; default: as much as it needs")
    add("--network-gb", type=float, default=50.0, help="GB/s between two ranks; default: 50")
    add("--quick", action="store_true", help="a tiny model on two ranks, whatever the sizes given")
    add("--json", type=Path, help="write the figures here")
    add("--trace", type=Path, help="write the steps with offload here, for Perfetto: out.json.gz")
    add("--picture", type=Path, help="draw the last step that --trace wrote: out.png")
    options = parser.parse_args()
    if options.quick:
        options.model, options.ranks, options.microbatches, options.length = "tiny", 2, 4, 1024
    options.groups = [name for name in options.groups.split(",") if name]
    if not options.groups or set(options.groups) - set(GROUPS):
        parser.error(f"--groups is {','.join(options.groups)!r}, expected attn, mlp or attn,mlp")
    if min(options.ranks, options.microbatches, options.length) < 1:
        parser.error("--ranks, --microbatches and --length must be at least 1")
    if min(options.gib or 0, options.host_gib or 0) < 0 or options.network_gb <= 0:
        parser.error("--gib and --host-gib must be at least 0, and --network-gb above 0")
    for name in ("json", "trace", "picture"):
        path = getattr(options, name)
        if path and not path.parent.is_dir():
            parser.error(f"--{name} is {path}, expected a file in a directory that is there")
    check_picture(parser, options)
    if not 0 <= options.fraction <= 1:
        parser.error(f"--fraction is {options.fraction:g}, expected 0 to 1")
    check_schedule(parser, options)
    if options.ranks * options.virtual_stages > SIZES[options.model].num_layers:
        parser.error(f"there are {SIZES[options.model].num_layers} layers, fewer than stages")
    try:
        order_of(options)
    except ValueError as failure:
        parser.error(str(failure))
    return options


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


def config_of(options: argparse.Namespace) -> OffloadConfig:
    """The engine's options."""
    ahead: Any = "auto" if options.gib is None else int(options.gib * GIB)
    host = None if options.host_gib is None else int(options.host_gib * GIB)
    return OffloadConfig(
        activation_offload_fraction=options.fraction,
        max_in_flight_bytes=ahead,
        prefetch_bytes=ahead,
        host_budget_bytes=host,
        min_offloaded_tensor_size=1024 if options.quick else 2**20,
    )


def bar(name: str) -> Callable[[int, int], None] | None:
    """Shows how far a run is, where somebody looks."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        full = BAR_WIDTH * done // total
        if done == total:
            sys.stderr.write("\r" + " " * (BAR_WIDTH + 30) + "\r")
        elif full != BAR_WIDTH * (done - 1) // total:
            sys.stderr.write(f"\r{name:<16} [{'#' * full}{'.' * (BAR_WIDTH - full)}]")
        sys.stderr.flush()

    return show


def simulate(options: argparse.Namespace) -> Comparison:
    """A step without offload, and one with it."""
    return compare(
        order_of(options),
        model_of(options),
        DEVICES[options.device],
        peers=PeerLink(bytes_per_s=options.network_gb * GB),
        config=config_of(options),
        progress=bar,
        trace=Trace(options.trace) if options.trace else None,
    )


def main() -> None:
    """A row for each rank."""
    options = parse_arguments()
    shape = "a V" if options.schedule in V_SHAPED else f"{options.virtual_stages} stages each"
    print(
        f"Llama {options.model} on {options.ranks} virtual {options.device}, {options.schedule}, "
        f"{shape if options.virtual_stages > 1 else 'a stage each'}, {options.microbatches} "
        f"microbatches of {options.length} tokens; {' and '.join(options.groups)} may leave\n"
    )
    found = simulate(options)
    print(found.table(DEVICES[options.device].memory_bytes))
    if options.picture:
        draw(read(options.trace), options.picture)
    if options.json:
        options.json.write_text(json.dumps(found.figures(), indent=2) + "\n")


if __name__ == "__main__":
    main()
