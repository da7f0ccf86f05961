"""Train a tiny Llama with its layers on the device, and with them on the host, and compare.

python examples/stream_layers.py                            # LoRA: the frozen base is streamed
python examples/stream_layers.py --full                     # every weight of the layers is
python examples/stream_layers.py --activation-checkpointing  # layers are computed again in backward
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from small_llama import VOCABULARY, check_width, is_same, make_llama
from torch import Tensor

from pp_offload import offload_layers

MIB = 2**20


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--full", action="store_true", help="train every weight, not adapters of a frozen base")
    add("--activation-checkpointing", action="store_true", help="compute layers again in backward")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--resident", type=int, default=2, help="layers on the device at a time")
    add("--steps", type=int, default=8)
    add("--batch", type=int, default=4, help="sequences")
    add("--layers", type=int, default=6)
    add("--width", type=int, default=128)
    add("--context", type=int, default=64, help="tokens per sequence")
    add("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if min(getattr(options, name) for name in ("steps", "batch", "layers", "context")) < 1:
        parser.error("every number must be at least 1")
    if not 1 <= options.resident <= options.layers:
        parser.error(f"--resident must be from 1 to --layers, which is {options.layers}")
    check_width(parser, options.width)
    return options


@dataclass
class Run:
    """What one training run came to."""

    losses: list[float] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    layer_bytes: int = 0
    brought_bytes: int = 0
    sent_bytes: int = 0


def make_model(options: argparse.Namespace) -> Any:
    """A small Llama, perhaps one that computes its layers again."""
    model = make_llama(options)
    if options.activation_checkpointing:
        model.enable_input_require_grads()
        enable = "activation_checkpointing_enable"  # its new name, where it has one
        getattr(model, enable, model.gradient_checkpointing_enable)()
    return model


def train(options: argparse.Namespace, *, stream: bool) -> Run:
    """One run."""
    model = make_model(options)
    layers = "model.layers" if options.full else "base_model.model.model.layers"
    parameters = model.get_submodule(layers).parameters()
    waiting = sum(p.nbytes for p in parameters if options.full or not p.requires_grad)
    if stream:
        offloaded = offload_layers(
            model,
            layers,
            frozen_only=not options.full,
            num_resident=options.resident,
            device=options.device,
        )
    else:
        model.to(options.device)
    run = Run(layer_bytes=waiting)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.005)
    rows = torch.randint(VOCABULARY, (options.batch, options.context)).to(options.device)
    for _ in range(options.steps):
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
    if stream:
        statistics = offloaded.statistics()
        run.layer_bytes = offloaded.peak_parameter_bytes_on_device
        run.brought_bytes = statistics.bytes_reloaded // options.steps
        run.sent_bytes = statistics.bytes_offloaded // options.steps
    run.parameters = [parameter.detach().cpu() for parameter in model.parameters()]
    return run


def format_figures(runs: dict[str, Run]) -> str:
    """The runs, one to a line."""
    head = ["layers", "first loss", "last loss", "held MiB", "brought MiB", "sent MiB"]
    rows = [head]
    for name, run in runs.items():
        sizes = run.layer_bytes, run.brought_bytes, run.sent_bytes
        losses = run.losses[0], run.losses[-1]
        rows.append([name, *(f"{x:.4f}" for x in losses), *(f"{x / MIB:.2f}" for x in sizes)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    verdict = "equal bit for bit" if is_same(*runs.values()) else "DIFFERENT"
    return "\n".join([*lines, f"all losses and final parameters: {verdict}"])


def main() -> int:
    """Train, and write the table; 1 if a bit differs."""
    options = parse_arguments()
    runs = {
        "on the device": train(options, stream=False),
        "on the host": train(options, stream=True),
    }
    print(format_figures(runs))
    if options.json:
        figures = {
            name: {key: value for key, value in asdict(run).items() if key != "parameters"}
            for name, run in runs.items()
        }
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if is_same(*runs.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
