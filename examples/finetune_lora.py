"""Finetune a tiny Llama with the Trainer of Hugging Face, without and with offload, and compare.

python examples/finetune_lora.py                            # LoRA
python examples/finetune_lora.py --full                     # every weight
python examples/finetune_lora.py --activation-checkpointing   # what the checkpoints keep leaves
python examples/finetune_lora.py --no-offload               # only without
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from live_bytes import LiveBytes
from small_llama import VOCABULARY, check_width, is_same, make_llama
from torch import Tensor
from transformers import PrinterCallback, Trainer, TrainingArguments

from pp_offload import ActivationOffloadingMixin

MIB = 2**20

FIELDS = TrainingArguments.__dataclass_fields__
CHECKPOINTING = next(
    n for n in FIELDS if n in ("activation_checkpointing", "gradient_checkpointing")
)
"""What checkpointing is called; it has a new name, and the old one warns."""


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--full", action="store_true", help="train every weight, not adapters of some")
    add("--activation-checkpointing", action="store_true", help="compute layers again in backward")
    add("--no-offload", action="store_true", help="train only without offload")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--steps", type=int, default=8)
    add("--accumulate", type=int, default=2, help="microbatches per step")
    add("--batch", type=int, default=4, help="sequences per microbatch")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=128)
    add("--context", type=int, default=128, help="tokens per sequence")
    add("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    sizes = ("steps", "accumulate", "batch", "layers", "context")
    if min(getattr(options, name) for name in sizes) < 1 or options.context < 2:
        parser.error("--context must be at least 2, and every other number at least 1")
    check_width(parser, options.width)
    return options


class OffloadTrainer(ActivationOffloadingMixin, Trainer):
    """The only line that offload needs; the rest of this file would be the same without."""


@dataclass
class Run:
    """What one training run came to."""

    losses: list[float] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    held_bytes: int = 0
    offloaded_bytes: int = 0
    host_peak_bytes: int = 0


def make_data(options: argparse.Namespace) -> list[dict[str, Tensor]]:
    """Random tokens, few enough to be learnt by heart."""
    generator = torch.Generator().manual_seed(1)
    shape = (2 * options.batch * options.accumulate, options.context)
    rows = torch.randint(VOCABULARY, shape, generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def measured(kind: type[Trainer], run: Run, device: str) -> type[Trainer]:
    """The trainer, noting what a forward leaves on the device for its backward."""

    class Measured(kind):  # type: ignore[misc, valid-type]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            with LiveBytes(device) as live:
                loss = super().compute_loss(*args, **kwargs)
            run.held_bytes = live.live
            return loss

    return Measured


def train(options: argparse.Namespace, *, offload: bool) -> Run:
    """One run."""
    run = Run()
    kind = measured(OffloadTrainer if offload else Trainer, run, options.device)
    with TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch,
            gradient_accumulation_steps=options.accumulate,
            **{CHECKPOINTING: options.activation_checkpointing},
            learning_rate=0.005,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=options.device == "cpu",
        )
        trainer = kind(make_llama(options), args, train_dataset=make_data(options))
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    run.losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    run.parameters = [parameter.detach().cpu() for parameter in trainer.model.parameters()]
    if offload:
        statistics = trainer.activation_offload.statistics()
        run.offloaded_bytes = statistics.bytes_offloaded // (options.steps * options.accumulate)
        run.host_peak_bytes = statistics.host_bytes_peak
    return run


def format_figures(without: Run, with_offload: Run | None) -> str:
    """The runs, side by side."""
    runs = [without] if with_offload is None else [without, with_offload]

    def mib(name: str) -> list[str]:
        return [f"{getattr(run, name) / MIB:.2f}" for run in runs]

    rows = [
        ["", "without offload", "with offload"][: 1 + len(runs)],
        ["loss, first step", *(f"{run.losses[0]:.4f}" for run in runs)],
        ["loss, last step", *(f"{run.losses[-1]:.4f}" for run in runs)],
        ["held on the device from forward to backward, MiB", *mib("held_bytes")],
        ["offloaded per microbatch, MiB", *mib("offloaded_bytes")],
        ["host memory at the peak, MiB", *mib("host_peak_bytes")],
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    if with_offload is not None:
        verdict = "equal bit for bit" if is_same(without, with_offload) else "DIFFERENT"
        lines.append(f"all losses and final parameters: {verdict}")
    return "\n".join(lines)


def main() -> int:
    """Train, and write the table; 1 if offload changed a bit."""
    options = parse_arguments()
    without = train(options, offload=False)
    with_offload = None if options.no_offload else train(options, offload=True)
    print(format_figures(without, with_offload))
    if options.json:
        runs = {"without": without, "with": with_offload}
        figures = {
            name: {k: v for k, v in asdict(run).items() if k != "parameters"}
            for name, run in runs.items()
            if run is not None
        }
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if with_offload is None or is_same(without, with_offload) else 1


if __name__ == "__main__":
    sys.exit(main())
