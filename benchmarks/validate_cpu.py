"""Bytes of a real training on the CPU, beside those that a virtual device says.

A GPT is trained by a schedule that runs all forwards before all backwards, for several numbers of
microbatches and fractions of groups that leave. Copies are made by the thread that computes, as on
a virtual device whose link takes no time, so that both have ended at once.

    python benchmarks/validate_cpu.py
    python benchmarks/validate_cpu.py --quick

Figures, by fraction and number of microbatches
    left_bytes, left_predicted    that left in a step
    peak_bytes, peak_predicted    of what a step makes: gradients, activations, and what came back
    difference                    of the peaks, predicted less found, in bytes

Peaks differ by the random state that attention saves on CUDA, and not on a CPU: two numbers of
eight bytes for each layer of each microbatch that has not had its backward.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import GPTConfig, Stage, loss_fn
from live_bytes import LiveBytes

from pp_offload import CpuBackend, OffloadConfig, use_backend
from pp_offload.pipelining import attach
from pp_offload.simulate import Hardware, Modules, PipelineOrder, memory, run_pipeline

GROUPS = {"attn": "layers.*.attn", "mlp": "layers.*.mlp"}
BATCH, NUM_STEPS = 4, 3

INSTANT = Hardware(
    name="instant",
    matmul_flops=inf,
    memory_bytes_per_s=inf,
    memory_bytes=2**40,
    link_bytes_per_s=inf,
    launch_s=0.0,
    copy_latency_s=0.0,
)


def config_of(fraction: float) -> OffloadConfig:
    return OffloadConfig(
        device_limit_bytes=None,
        activation_offload_fraction=fraction,
        min_offloaded_tensor_size=1024,
    )


def trained(model: GPTConfig, fraction: float, num_microbatches: int) -> tuple[int, int]:
    """Bytes that left in the last step, and its peak."""
    module = Stage(model, 0, 1)
    stage = PipelineStage(module, 0, 1, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=num_microbatches, loss_fn=loss_fn)
    tokens = torch.randint(256, (2, num_microbatches * BATCH, model.context))
    with use_backend(CpuBackend(inline_bytes=2**40)) as manager:
        attach(schedule, GROUPS, config_of(fraction))
        for _ in range(NUM_STEPS):
            module.zero_grad()
            before = manager.statistics()
            with LiveBytes("cpu") as live:
                schedule.step(tokens[0], target=tokens[1])
        return manager.statistics().since(before).bytes_offloaded, live.peak


def predicted(model: GPTConfig, fraction: float, num_microbatches: int) -> tuple[int, int]:
    """The same of a virtual device, without what is there before a step."""
    with torch.device("meta"):
        module = Stage(model, 0, 1)
        tokens = torch.empty(BATCH, model.context, dtype=torch.int64)
        target = torch.empty_like(tokens)

    def loss(logits: Tensor) -> Tensor:
        return loss_fn(logits, target)

    work = Modules([module], example=tokens, loss_fn=loss, groups=GROUPS)
    sizes = {"num_ranks": 1, "num_stages": 1, "num_microbatches": num_microbatches}
    order = PipelineOrder(ScheduleGPipe, **sizes)
    step = run_pipeline(order, work, INSTANT, config=config_of(fraction), num_steps=NUM_STEPS)
    there = sum(one.nbytes for one in (*module.parameters(), target))
    there += num_microbatches * tokens.nbytes
    return step.ranks[0].bytes_offloaded, step.ranks[0].peak_bytes - there


def compared(model: GPTConfig, fraction: float, num_microbatches: int) -> dict[str, Any]:
    left, peak = trained(model, fraction, num_microbatches)
    left_predicted, peak_predicted = predicted(model, fraction, num_microbatches)
    return {
        "fraction": fraction,
        "microbatches": num_microbatches,
        "left_bytes": left,
        "left_predicted": left_predicted,
        "peak_bytes": peak,
        "peak_predicted": peak_predicted,
        "difference": peak_predicted - peak,
    }


def main() -> None:
    """Train, predict, and print both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    memory.ROUNDING_BYTES = 1  # a CPU's storages are as large as their tensors
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = GPTConfig(num_layers=4, width=256, context=128)
    counts = (2, 4, 8)
    if options.quick:
        model, counts = GPTConfig(num_layers=2, width=64, context=64), (3,)
    rows = []
    for fraction in (0.0, 0.5, 1.0):
        for num in counts:
            rows.append(one := compared(model, fraction, num))
            print(
                f"fraction {fraction:.1f}, {num} microbatches: {one['left_bytes']:,} bytes left, "
                f"predicted {one['left_predicted']:,}; peak {one['peak_bytes']:,}, predicted "
                f"{one['peak_predicted']:,}: {one['difference']:+,}",
                flush=True,
            )
    dist.destroy_process_group()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
