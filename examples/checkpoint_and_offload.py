"""Train a byte-level GPT in five ways that trade device memory for time, and compare them.

python examples/checkpoint_and_offload.py
python examples/checkpoint_and_offload.py --device cuda --layers 24 --width 1024 --context 1024
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gpt import GPTConfig, Stage, count_up, loss_fn
from live_bytes import LiveBytes
from tables import format_table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pp_offload import get_lora_act_offloading_ctx_manager
from pp_offload._core.statistics import OffloadStatistics
from pp_offload.backends import Backend, default_backend
from pp_offload.checkpointing import (
    ActivationCheckpointing,
    ActivationCheckpointingVariants,
    FullACParams,
    SelectiveOpACParams,
)

MIB = 2**20
FULL = ActivationCheckpointingVariants.FULL_ACTIVATION_CHECKPOINTING
BY_OP = ActivationCheckpointingVariants.SELECTIVE_OP_ACTIVATION_CHECKPOINTING
DEAR = (
    "ops.aten.addmm.default",  # a linear layer with a bias
    "ops.aten._scaled_dot_product_flash_attention.default",
    "ops.aten._scaled_dot_product_flash_attention_for_cpu.default",
)
"""Operators that are not worth computing again."""

Context = Callable[[], AbstractContextManager[Any]]
Statistics = Callable[[], OffloadStatistics] | None
Way = Callable[[Stage, Backend], tuple[Context, Statistics]]


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--steps", type=int, default=8)
    add("--layers", type=int, default=6)
    add("--width", type=int, default=128)
    add("--context", type=int, default=128, help="bytes per sequence")
    add("--batch", type=int, default=8, help="sequences per step")
    add("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if min(options.steps, options.layers, options.width, options.context, options.batch) < 1:
        parser.error("all numbers must be at least 1")
    return options


def none(model: Stage, backend: Backend) -> tuple[Context, Statistics]:
    """Everything stays on the device."""
    return nullcontext, None


def full(model: Stage, backend: Backend) -> tuple[Context, Statistics]:
    """Layers keep their inputs."""
    checkpoint(model, backend, FULL, FullACParams())
    return nullcontext, None


def selective_op(model: Stage, backend: Backend) -> tuple[Context, Statistics]:
    """Layers keep their inputs, and outputs of some operators."""
    checkpoint(model, backend, BY_OP, SelectiveOpACParams(save_ops_keys=DEAR))
    return nullcontext, None


def offload(model: Stage, backend: Backend) -> tuple[Context, Statistics]:
    """Everything goes to the host."""
    context = get_lora_act_offloading_ctx_manager(model, backend=backend)
    return lambda: context, context.statistics


def both(model: Stage, backend: Backend) -> tuple[Context, Statistics]:
    """Layers keep their inputs, and outputs of some operators, on the host."""
    params = SelectiveOpACParams(offload_ops_keys=DEAR, offload_inputs=True)
    return nullcontext, checkpoint(model, backend, BY_OP, params)


def checkpoint(
    model: Stage,
    backend: Backend,
    variant: ActivationCheckpointingVariants,
    params: FullACParams,
) -> Statistics:
    """Wrap the layers; what says what was offloaded."""
    recompute = ActivationCheckpointing.apply_activation_checkpointing_(
        variant, "layers", model, params, backend=backend
    )
    return recompute.stash.statistics if recompute.stash else None


WAYS: dict[str, Way] = {
    "none": none,
    "full": full,
    "selective-op": selective_op,
    "offload": offload,
    "both": both,
}


class RecomputedOps(TorchDispatchMode):
    """Counts operators that run in backward with gradients on: what a checkpoint runs again."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_in_backward = torch._C._current_graph_task_id() != -1
        self.num += is_in_backward and torch.is_grad_enabled() and "detach" not in str(func)
        return func(*args, **(kwargs or {}))


@dataclass
class Run:
    """What one way of training came to."""

    step_ms: float
    held_bytes: int
    """Made in a forward and alive on the device when it is over."""

    peak_bytes: int
    """The same at the peak, in forward or backward."""

    offloaded_bytes: int
    recomputed_ops: int


def train(way: str, options: argparse.Namespace) -> tuple[Run, list[Tensor]]:
    """A run from the same seed; its figures, and its losses and final parameters."""
    torch.manual_seed(0)
    config = GPTConfig(num_layers=options.layers, width=options.width, context=options.context)
    model = Stage(config, 0, 1).to(options.device)
    backend = default_backend(torch.device(options.device))
    context, statistics = WAYS[way](model, backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, times = [], []
    for step in range(options.steps):
        tokens = count_up(step, options.batch, options.context).to(options.device)
        start = time.perf_counter()
        with context():
            loss = loss_fn(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        losses.append(loss.detach())
        times.append((time.perf_counter() - start) * 1e3)
    # Once more, not timed, under observers that are too slow to leave on.
    tokens = count_up(options.steps, options.batch, options.context).to(options.device)
    before = statistics().bytes_offloaded if statistics else 0
    with RecomputedOps() as again, LiveBytes(options.device) as live:
        with context():
            loss = loss_fn(model(tokens[:, :-1]), tokens[:, 1:])
        backend.synchronize()
        if statistics:
            statistics()  # lets go of what was copied
        held = live.live
        loss.backward()
    moved = statistics().bytes_offloaded - before if statistics else 0
    run = Run(sorted(times)[len(times) // 2], held, live.peak, moved, again.num)
    return run, losses + [p.detach() for p in model.parameters()]


def format_runs(runs: dict[str, Run]) -> str:
    """One table."""
    rows = [("", "step ms", "held MiB", "peak MiB", "offloaded MiB", "ops run again")]
    for way, run in runs.items():
        in_mib = (run.held_bytes, run.peak_bytes, run.offloaded_bytes)
        mib = [f"{nbytes / MIB:.1f}" for nbytes in in_mib]
        rows.append((way, f"{run.step_ms:.0f}", *mib, str(run.recomputed_ops)))
    return format_table(rows)


def main() -> int:
    """Train in every way; 1 if one came to other numbers."""
    options = parse_arguments()
    if options.device == "cpu":
        torch.set_num_threads(1)
    runs: dict[str, Run] = {}
    expected: list[Tensor] = []
    is_equal = True
    for way in WAYS:
        runs[way], results = train(way, options)
        expected = expected or results
        is_equal &= all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
    print(format_runs(runs))
    verdict = "equal bit for bit" if is_equal else "DIFFERENT"
    print(f"all losses and final parameters: {verdict}")
    if options.json:
        figures = {way: asdict(run) for way, run in runs.items()}
        options.json.write_text(json.dumps(figures | {"bitwise_equal": is_equal}, indent=1) + "\n")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
