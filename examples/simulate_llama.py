"""A step of Llama 3 on a pipeline of virtual GPUs, without and with activation offload.

python examples/simulate_llama.py                              # 8B on four H100, 1F1B
python examples/simulate_llama.py --groups attn,mlp --gib 3    # more leaves, further ahead
python examples/simulate_llama.py --model 70b --ranks 8 --length 4096
python examples/simulate_llama.py --schedule interleaved1f1b --virtual-stages 2
python examples/simulate_llama.py --trace out.json.gz          # for https://ui.perfetto.dev

The engine runs as it is, once for each rank, on tensors without data and streams with clocks: no
GPU and no memory is needed, and no time is measured. Of the device's memory, parameters, gradients
and activations count; an optimizer's state does not.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

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
from pp_offload.simulate import DEVICES
from pp_offload.simulate.compare import Comparison, compare
from pp_offload.trace import Trace


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    add = parser.add_argument
    add("--fraction", type=float, default=1.0, help="part of the groups that leaves; default: 1")
    add("--gib", type=float, help="bound on bytes under way, each way; default: the engine's own")
    add("--host-gib", type=float, help="host memory of a rank; default: as much as it needs")
    add("--json", type=Path, help="write the figures here")
    add("--trace", type=Path, help="write the steps with offload here, for Perfetto: out.json.gz")
    options = parser.parse_args()
    check_arguments(parser, options)
    return options


def config_of(options: argparse.Namespace) -> OffloadConfig:
    """The engine's options."""
    ahead: Any = "auto" if options.gib is None else int(options.gib * GIB)
    host = None if options.host_gib is None else int(options.host_gib * GIB)
    return OffloadConfig(
        activation_offload_fraction=options.fraction,
        max_in_flight_bytes=ahead,
        prefetch_bytes=ahead,
        host_budget_bytes=host,
        min_offloaded_tensor_size=min_numel_of(options),
    )


def simulate(options: argparse.Namespace) -> Comparison:
    """A step without offload, and one with it."""
    return compare(
        order_of(options),
        model_of(options),
        DEVICES[options.device],
        peers=peers_of(options),
        config=config_of(options),
        trace=Trace(options.trace) if options.trace else None,
    )


def main() -> None:
    """A row for each rank."""
    options = parse_arguments()
    print(f"{title_of(options)}\n")
    both = simulate(options)
    print(both.table(DEVICES[options.device].memory_bytes))
    if options.json:
        options.json.write_text(json.dumps(both.figures(), indent=2) + "\n")


if __name__ == "__main__":
    main()
