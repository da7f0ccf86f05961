"""Draw the pictures of the page 'Reading the picture': python docs/pictures.py

A virtual pipeline of Llama 3 8B on H100, where more leaves than the link can carry, so that compute
has to wait. Nothing is measured. It takes a minute.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from PIL import Image
from torch.distributed.pipelining import Schedule1F1B

from pp_offload import OffloadConfig
from pp_offload.simulate import DEVICES, Modules, PipelineOrder, run_pipeline
from pp_offload.trace import Timeline, Trace
from pp_offload.trace.picture import draw

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "examples"))
from llama import SIZES, Stage, loss_fn  # noqa: E402


def traced(num_ranks: int, num_layers: int, num_microbatches: int, length: int) -> Timeline:
    """Trace the steps of a pipeline that offloads every saved tensor of its layers."""
    config = replace(SIZES["8b"], num_layers=num_layers)
    stages = [Stage(config, index, num_ranks, length=length) for index in range(num_ranks)]
    tokens = torch.empty(1, length, dtype=torch.int64, device="meta")
    work = Modules(
        stages, example=tokens, loss_fn=lambda logits: loss_fn(logits, torch.empty_like(tokens))
    )
    order = PipelineOrder(
        Schedule1F1B,
        num_ranks=num_ranks,
        num_stages=num_ranks,
        num_microbatches=num_microbatches,
    )
    with TemporaryDirectory() as folder:
        trace = Trace(Path(folder) / "out.json")
        everything = OffloadConfig(
            rematerialize="none", max_in_flight_bytes=5 * 2**29, prefetch_bytes=5 * 2**28
        )
        run_pipeline(order, work, DEVICES["H100"], config=everything, trace=trace)
    assert trace.timeline is not None
    return trace.timeline


def draw_small(timeline: Timeline, path: Path, ranks: list[int] | None = None) -> None:
    """Draw with as many colours as the eye sees: a third of the bytes."""
    draw(timeline, path, ranks=ranks)
    with Image.open(path) as whole:
        few = whole.convert("RGB").quantize(128)
    few.save(path, optimize=True)


def main() -> None:
    """Draw one rank, and four."""
    draw_small(traced(2, 16, 3, 4096), DOCS / "step_of_a_rank.png", [1])
    draw_small(traced(4, 16, 6, 4096), DOCS / "step_of_four_ranks.png")


if __name__ == "__main__":
    main()
