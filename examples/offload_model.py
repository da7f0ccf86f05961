"""Train a byte-level GPT whose parameters stay on the host, and compare it with one on the device.

python examples/offload_model.py
python examples/offload_model.py --slices 8 --microbatches 4
python examples/offload_model.py --device cuda --layers 24 --width 2048 --slices 12
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from gpt import Embedding, GPTConfig, Head, Layer, count_up, loss_fn
from tables import format_table
from torch import Tensor, nn

from pp_offload import OffloadModel

MIB = 2**20


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--steps", type=int, default=8)
    add("--slices", type=int, default=6, help="pieces that come to the device one by one")
    add("--microbatches", type=int, default=1, help="parts of the batch, one after another")
    add("--layers", type=int, default=10)
    add("--width", type=int, default=128)
    add("--context", type=int, default=64, help="bytes per sequence")
    add("--batch", type=int, default=8, help="sequences per step")
    add("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    numbers = (options.steps, options.slices, options.microbatches, options.layers)
    if min(*numbers, options.width, options.context, options.batch) < 1:
        parser.error("all numbers must be at least 1")
    if options.slices > options.layers + 2:
        parser.error(f"--slices is at most --layers and two more, {options.layers + 2} here")
    if options.batch % options.microbatches:
        parser.error(f"--microbatches must divide --batch, which is {options.batch}")
    return options


class InParts(nn.Module):
    """The plain model, given the same microbatches."""

    def __init__(self, model: nn.Sequential, num_microbatches: int) -> None:
        super().__init__()
        self.model = model
        self.num_microbatches = num_microbatches

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.model(part) for part in x.chunk(self.num_microbatches)])


def on_device(model: nn.Sequential, options: argparse.Namespace) -> nn.Module:
    """All parameters are there all the time."""
    return InParts(model.to(options.device), options.microbatches)


def in_slices(model: nn.Sequential, options: argparse.Namespace) -> nn.Module:
    """Two slices are there at a time."""
    return OffloadModel(
        model,
        torch.device(options.device),
        num_slices=options.slices,
        num_microbatches=options.microbatches,
    )


def run_again(model: nn.Sequential, options: argparse.Namespace) -> nn.Module:
    """The same, and of activations only what goes into a slice is kept, on the host."""
    return OffloadModel(
        model,
        torch.device(options.device),
        num_slices=options.slices,
        num_microbatches=options.microbatches,
        checkpoint_activation=True,
    )


WAYS = {"on the device": on_device, "in slices": in_slices, "run again": run_again}


@dataclass
class Run:
    """What one way of training came to."""

    step_ms: float
    parameter_bytes: int
    """Of parameters on the device, at the most."""

    brought_bytes: int
    """Of parameters, brought to the device in a step."""

    sent_bytes: int
    """Of gradients, sent to the host in a step."""

    loss_first: float
    loss_last: float


def train(way: str, options: argparse.Namespace) -> tuple[Run, list[Tensor]]:
    """A run from the same seed; its figures, and its losses and final parameters."""
    torch.manual_seed(0)
    config = GPTConfig(options.layers, options.width, context=options.context)
    layers = [Layer(config) for _ in range(options.layers)]
    model = WAYS[way](nn.Sequential(Embedding(config), *layers, Head(config)), options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, times = [], []
    for step in range(options.steps):
        tokens = count_up(step, options.batch, options.context).to(options.device)
        start = time.perf_counter()
        loss = loss_fn(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
        times.append((time.perf_counter() - start) * 1e3)
    held, brought, sent = sum(p.nbytes for p in model.parameters()), 0, 0
    if isinstance(model, OffloadModel):
        held, moved = model.peak_parameter_bytes_on_device, model.statistics()
        brought = moved.bytes_reloaded // options.steps
        sent = moved.bytes_offloaded // options.steps
    ends = losses[0].item(), losses[-1].item()
    run = Run(sorted(times)[len(times) // 2], held, brought, sent, *ends)
    return run, losses + [p.detach().cpu() for p in model.parameters()]


def format_runs(runs: dict[str, Run]) -> str:
    """One table."""
    rows = [
        ("parameters", "first loss", "last loss", "step ms", "held MiB", "brought MiB", "sent MiB")
    ]
    for way, run in runs.items():
        in_mib = (run.parameter_bytes, run.brought_bytes, run.sent_bytes)
        losses = (f"{run.loss_first:.4f}", f"{run.loss_last:.4f}")
        rows.append((way, *losses, f"{run.step_ms:.0f}", *(f"{n / MIB:.1f}" for n in in_mib)))
    return format_table(rows)


def same_bits(runs: list[list[Tensor]]) -> bool:
    """Whether all have the losses and parameters of the first."""
    pairs = (pair for run in runs for pair in zip(run, runs[0], strict=True))
    return all(torch.equal(*pair) for pair in pairs)


def main() -> int:
    """Train in every way; 1 if one came to other numbers."""
    options = parse_arguments()
    if options.device == "cpu":
        torch.set_num_threads(1)
    trained = {way: train(way, options) for way in WAYS}
    runs = {way: run for way, (run, _) in trained.items()}
    results = [results for _, results in trained.values()]
    if options.device == "cuda":  # where optimizers on the host and on the device round differently
        what, results = "the first losses", [each[:1] for each in results]
    else:
        what = "all losses and final parameters"
    equal = same_bits(results)
    print(format_runs(runs))
    print(f"{what}: {'equal bit for bit' if equal else 'DIFFERENT'}")
    if options.json:
        figures = {way: asdict(run) for way, run in runs.items()}
        options.json.write_text(json.dumps(figures | {"bitwise_equal": equal}, indent=1) + "\n")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
