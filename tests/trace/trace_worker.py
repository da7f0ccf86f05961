"""One rank of a gloo pipeline that is traced; run by ``test_trace_ranks.py``."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from pp_offload import OffloadConfig, attach
from pp_offload.trace import Trace

WIDTH, NUM_MICROBATCHES, NUM_STEPS = 64, 4, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    stage = PipelineStage(
        nn.Sequential(Layer(), Layer(), Layer()), rank, dist.get_world_size(), torch.device("cpu")
    )
    schedule = Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=nn.functional.mse_loss)
    x = torch.randn(NUM_MICROBATCHES * 8, WIDTH)
    data: dict[str, Any] = {"target": x} if rank else {}
    config = OffloadConfig(min_offloaded_tensor_size=1)
    with Trace(sys.argv[1], steps=range(1, 3)):
        with attach(schedule, {"mlp": "*.mlp"}, config):  # with options: another engine
            for _ in range(NUM_STEPS):
                schedule.step(*([] if rank else [x]), **data)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
