"""A user's program: ``mypy --strict`` knows the types of all that it calls. Nothing runs it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from pp_offload import OffloadActivations, OffloadConfig, OffloadModel, attach, summary_table


def main(model: nn.Sequential, x: Tensor, rank: int) -> str:
    schedule = Schedule1F1B(PipelineStage(model, rank, 2, x.device), 8)
    with attach(schedule, {"mlp": "layers.*.mlp"}, OffloadConfig(verify=True)) as handle:
        schedule.step(x)
        handle.detach()
    with OffloadActivations() as activations:
        loss: Tensor = model(x).sum()
    torch.autograd.backward(loss)
    num_bytes: int = activations.statistics().bytes_offloaded
    sliced = OffloadModel(model, torch.device("cpu"), num_slices=2)
    sliced(x)
    return f"{num_bytes} bytes\n{summary_table()}"
