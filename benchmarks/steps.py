"""Cost of a step beside its copies: its begin, and what is attached to it.

On the CPU with small copies done inline. ``reset`` is timed by itself, behind a step of 10,000
groups that saved a tensor each and have all run backward. The begin of an attached step is timed
for a stage of 1,000 parameters; the time for a stage of two is taken off, so that the reset inside
does not count.

    python benchmarks/steps.py --json steps.json

Figures; of each the least and the median
    reset_ms_per_10000_groups      of a step like the one before, by its chunks; most groups go
                                   while backward runs, one chunk behind it
    attach_us_per_1000_parameters  the begin of a step
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
import torch.distributed as dist
from command import parser_for, write_figures
from disk_tier import seconds_of
from hook_overhead import MAX_NUMEL, chain, no_garbage
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from pp_offload import CpuBackend, OffloadConfig, attach, use_backend
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface

NUM_GROUPS = 10_000
CHUNKS = (100, 16)
NUM_PARAMETERS = 1_000
PER_BLOCK = 8
Figure = dict[str, float]


def figure(values: list[float]) -> Figure:
    return {"min": min(values), "median": statistics.median(values)}


def run_step(num_chunks: int, num_groups: int) -> None:
    """All forwards, then all backwards in the same order."""
    values, outputs = torch.ones(16), []
    for _ in range(num_chunks):
        off_interface.init_chunk_handler(None, None, 1)
        x = values.clone().requires_grad_()
        for _ in range(num_groups):
            with off_interface(True, x, "group") as x:
                y = chain(x, 1)
            x = off_interface.group_commit(y, name="group")
        outputs.append(x)
    for output in outputs:
        output.backward(torch.ones_like(output))


def reset_ms(num_chunks: int, num_groups: int, rounds: int) -> Figure:
    """Of steps that have all the same tensors."""
    times, backend = [], CpuBackend(inline_bytes=MAX_NUMEL)
    config = OffloadConfig(device_limit_bytes=None, min_offloaded_tensor_size=1)
    with use_backend(backend, config=config) as manager, no_garbage():
        for _ in range(4 + rounds):  # in the first, idle groups are looked for
            run_step(num_chunks, num_groups)
            times.append(seconds_of(manager.reset) * 1e3)
    return figure(times[4:])


class Block(nn.Module):
    """Eight parameters, in modules as a transformer's layer has them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Sequential(nn.Linear(4, 4), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(self.up(self.norm(x))))


def begin_us(model: nn.Module, rounds: int) -> Figure:
    """The begin of an attached step."""
    times = []
    stage = PipelineStage(model, 0, 1, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 1, loss_fn=nn.functional.mse_loss)
    with use_backend(CpuBackend()), attach(schedule) as handle, no_garbage():
        for _ in range(2 + rounds):
            times.append(seconds_of(handle.begin_step) * 1e6)
    return figure(times[2:])


def attach_us(rounds: int) -> Figure:
    """What 1,000 parameters add to the begin of a step."""
    large = nn.Sequential(*(Block() for _ in range(NUM_PARAMETERS // PER_BLOCK)))
    with_all, without = begin_us(large, rounds), begin_us(nn.Linear(4, 4), rounds)
    return {kind: with_all[kind] - without[kind] for kind in with_all}


def measure(rounds: int, num_groups: int) -> dict[str, Any]:
    """All figures, with ``num_groups`` in a step."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        attaching = attach_us(20 * rounds)
    finally:
        dist.destroy_process_group()
    sizes = {chunks: (chunks, num_groups // chunks, rounds) for chunks in CHUNKS}
    return {
        "reset_ms_per_10000_groups": {n: reset_ms(*size) for n, size in sizes.items()},
        "attach_us_per_1000_parameters": attaching,
    }


def table(figures: dict[str, Any]) -> str:
    reset, attach = figures
    rows = {f"{reset}, {n} chunks": times for n, times in figures[reset].items()}
    lines = [f"{'':44}{'least':>10}{'median':>10}"]
    for name, times in (rows | {attach: figures[attach]}).items():
        lines.append(f"{name:44}{times['min']:10.3f}{times['median']:10.3f}")
    return "\n".join(lines)


def main() -> None:
    options = parser_for(__doc__).parse_args()
    torch.set_num_threads(1)
    figures = measure(1, 200) if options.quick else measure(10, NUM_GROUPS)
    print(table(figures))
    write_figures(figures, options.json)


if __name__ == "__main__":
    main()
