"""What each GPU of a pipeline that trains Llama 3 keeps, sends away and recomputes.

python examples/plan_llama.py                              # 70B on eight H100 of 80 GB
python examples/plan_llama.py --limit-gib 60 -o plan.json  # and a file for OffloadConfig(plan=...)
python examples/plan_llama.py --model 8b --ranks 4 --length 8192 --limit-gib 30

The limit is for parameters, gradients and activations; what it leaves of the device is for the
optimizer, and for what an allocator cannot use. No GPU is needed, and no time is measured: the
engine's own rules are run on numbers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from llama_pipeline import (
    GIB,
    add_arguments,
    check_arguments,
    min_numel_of,
    model_of,
    order_of,
    peers_of,
    title_of,
)

from pp_offload import OffloadConfig
from pp_offload.plan import Chooser, InfeasibleError, record
from pp_offload.plan.table import table
from pp_offload.simulate import DEVICES


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.set_defaults(model="70b", ranks=8, microbatches=32, length=4096, groups="attn,mlp")
    add = parser.add_argument
    add("--limit-gib", type=float, default=70.0, help="of each device; default: 70")
    add("--recompute", action=argparse.BooleanOptionalAction, default=True, help="layers may be")
    add("-o", "--output", type=Path, help="write the plan here: plan.json")
    options = parser.parse_args()
    check_arguments(parser, options)
    return options


def main() -> None:
    """A row for each rank."""
    options = parse_arguments()
    order, work, device = order_of(options), model_of(options), DEVICES[options.device]
    if not options.recompute:
        work.layers = None
    peers, config = (
        peers_of(options),
        OffloadConfig(min_offloaded_tensor_size=min_numel_of(options)),
    )
    tapes = record(order, work, device, config)
    chooser = Chooser(order, tapes, device, config=config, peers=peers)
    try:
        plan = chooser.plan(int(options.limit_gib * GIB), made_for=title_of(options))
    except InfeasibleError as refused:
        raise SystemExit(f"--limit-gib: {refused}") from refused
    none = chooser.without_offload()
    print(f"{title_of(options)}\n\n{table(plan, none)}")
    if options.output:
        plan.save(options.output)


if __name__ == "__main__":
    main()
