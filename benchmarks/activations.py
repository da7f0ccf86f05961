"""What it costs to offload all that a forward saves: per saved tensor, and per step of a GPT.

On the CPU with small copies done inline, so that no thread hand-off is counted; there
``save_on_cpu`` copies nothing, TRL and torchtune do not run, and what is offloaded makes no memory
smaller. All variants run the same graph in one process, in turns; a figure is the least of many.

    python benchmarks/activations.py --json activations.json
    python benchmarks/activations.py --device cuda --layers 24 --width 2048 --context 2048

Figures
    ratio_to_floor     cost of a saved tensor beyond plain autograd / that of hooks that do only
                       ``empty`` and ``copy_`` both ways, on the CPU
    step_ratio         time of forward and backward / that without offload, by variant
    held_bytes         made in a forward and alive on the device when it is over, by variant
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from hook_overhead import (
    FLOOR,
    IDENTITY,
    MAX_NUMEL,
    PLAIN,
    SAVE_ON_CPU,
    Hooked,
    Load,
    cost_ns,
    least_ns,
)
from peers import installed_peers
from torch.autograd.graph import save_on_cpu

from pp_offload import CpuBackend, OffloadActivations
from pp_offload.checkpointing import (
    ActivationCheckpointing,
    ActivationCheckpointingVariants,
    FullACParams,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import VOCABULARY, GPTConfig, Stage, loss_fn  # noqa: E402
from live_bytes import LiveBytes  # noqa: E402

MIB = 2**20
TENSORS = 100
FULL = ActivationCheckpointingVariants.FULL_ACTIVATION_CHECKPOINTING
Log = Callable[[str], None]
Context = Callable[[], AbstractContextManager[Any]]


def measure_tensors(seconds: float, min_rounds: int, log: Log) -> dict[str, Any]:
    """The cost of a saved tensor of 4 KiB, by variant."""
    load = Load(1, 1, 1, TENSORS, has_margin=False)
    offload = OffloadActivations(min_offload_size=1, backend=CpuBackend(inline_bytes=MAX_NUMEL))
    ours = Hooked("ours", lambda: offload)
    peers = [Hooked(name, context) for name, context in installed_peers(1)]
    variants = [IDENTITY, FLOOR, SAVE_ON_CPU, *peers, ours]
    least = least_ns([(one, load) for one in (PLAIN, *variants)], seconds, min_rounds)
    moved = offload.statistics().bytes_offloaded
    if moved == 0:
        raise RuntimeError("nothing was offloaded, so the figures say nothing")
    costs = {one.name: cost_ns(least, one, load) for one in variants}
    floor = costs[FLOOR.name]
    log("cost per saved tensor of 4 KiB beyond plain autograd, and over the copying floor")
    for name, ns in costs.items():
        log(f"  {name:24}{ns / 1e3:9.2f} us ({ns / floor:5.2f})")
    return {"cost_ns": costs, "ratio_to_floor": costs["ours"] / floor}


class Trained:
    """A GPT that is trained in one way.

    Args:
        name: Of the way.
        options: Sizes.
        context: Entered around every forward.
        checkpoint: How layers are checkpointed, if they are.
    """

    def __init__(
        self,
        name: str,
        options: argparse.Namespace,
        context: Context = nullcontext,
        checkpoint: FullACParams | None = None,
    ) -> None:
        self.name = name
        self._context = context
        self._options = options
        torch.manual_seed(0)
        config = GPTConfig(num_layers=options.layers, width=options.width, context=options.context)
        self._model = Stage(config, 0, 1).to(options.device)
        if checkpoint is not None:
            ActivationCheckpointing.apply_activation_checkpointing_(
                FULL, "layers", self._model, checkpoint
            )
        rows = (options.batch, options.context + 1)
        self._tokens = torch.randint(VOCABULARY, rows).to(options.device)

    def step_ns(self) -> int:
        """Time of a forward and a backward."""
        synchronize(self._options.device)
        start = time.perf_counter_ns()
        with self._context():
            loss = loss_fn(self._model(self._tokens[:, :-1]), self._tokens[:, 1:])
        loss.backward()
        synchronize(self._options.device)
        return time.perf_counter_ns() - start

    def held_bytes(self) -> int:
        """Made in a forward and alive when it is over."""
        with LiveBytes(self._options.device) as live:
            with self._context():
                loss = loss_fn(self._model(self._tokens[:, :-1]), self._tokens[:, 1:])
            synchronize(self._options.device)
            held = live.live
            loss.backward()
        return held


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        torch.accelerator.synchronize()


def measure_steps(options: argparse.Namespace, min_rounds: int, log: Log) -> dict[str, Any]:
    """A step of forward and backward, by variant; all take turns."""
    is_accelerated = options.device != "cpu"
    offload = OffloadActivations()
    ways = [
        Trained("none", options),
        Trained("ours", options, lambda: offload),
        Trained("ours, checkpoints", options, checkpoint=FullACParams(offload_inputs=True)),
        Trained("checkpoints", options, checkpoint=FullACParams()),
        Trained("save_on_cpu", options, lambda: save_on_cpu(pin_memory=is_accelerated)),
        *(
            Trained(name, options, context)
            for name, context in installed_peers(256, use_streams=is_accelerated)
        ),
    ]
    least = {way.name: way.step_ns() for way in ways}
    gc.collect()
    end, rounds = time.perf_counter() + options.seconds, 0
    while rounds < min_rounds or time.perf_counter() < end:
        for way in ways:
            least[way.name] = min(least[way.name], way.step_ns())
        rounds += 1
    ratios = {name: ns / least["none"] for name, ns in least.items()}
    held = {way.name: way.held_bytes() for way in ways}
    log(f"\nforward and backward of a GPT with {options.layers} layers, on {options.device}")
    for name, ratio in ratios.items():
        ms, mib = least[name] / 1e6, held[name] / MIB
        log(f"  {name:24}{ms:9.1f} ms ({ratio:5.3f}){mib:9.1f} MiB held")
    return {"step_ratio": ratios, "held_bytes": held}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="per part of two")
    parser.add_argument("--quick", action="store_true", help="one round; the figures mean nothing")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    min_rounds = 1 if options.quick else 5
    if options.quick:
        options.seconds, options.layers, options.width = 0.0, 2, 32
    figures: dict[str, Any] = {"torch": torch.__version__, "device": options.device}
    figures |= measure_tensors(options.seconds, min_rounds, print)
    figures |= measure_steps(options, min_rounds, print)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
