"""Train torchtitan's Llama debug model on two pipeline ranks, without and with activation offload.

python examples/train_torchtitan.py                               # two processes on the CPU
python examples/train_torchtitan.py --schedule Interleaved1F1B --checkpoint op
torchrun --nproc-per-node 2 examples/train_torchtitan.py          # the same under torchrun

torchtitan's own trainer needs a GPU. So this calls what the trainer calls: the spec's model, its
``pipelining_fn``, and the schedule that one returns. It needs `pip install 'pp_offload[titan]'`.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pp_offload import OffloadConfig, PipelineOffloadManager, summary_table
from pp_offload.integrations.torchtitan import with_offload

if not find_spec(
    "triton"
):  # torch for the CPU has none; kernels of experts need it, Llama does not
    sys.modules["torchtitan.models.moe.kernels"] = MagicMock()
with patch("torch._utils._get_available_device_type", lambda: "cpu"):  # or torchtitan wants CUDA
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.llama3 import get_train_spec
    from torchtitan.protocols.train_spec import TrainSpec

logging.getLogger("root").setLevel(logging.WARNING)  # which torchtitan writes to

CHECKPOINTS = {"none": ("none", "2"), "full": ("full", "2"), "layer": ("selective", "2")} | {
    "op": ("selective", "op")
}
"""Mode and option of torchtitan's activation checkpoints; ``layer`` is what it has by default."""

RANKS = 2
LENGTH = 64


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--steps", type=int, default=3)
    add("--microbatches", type=int, default=4)
    add("--schedule", default="1F1B", help="a schedule by its name in torchtitan")
    add("--checkpoint", choices=CHECKPOINTS, default="layer")
    add("--compile", action="store_true", help="compile each block, as torchtitan does")
    return parser.parse_args(arguments)


def choose_groups(options: argparse.Namespace) -> dict[str, str]:
    """Blocks where each is compiled or in a checkpoint: a group inside of either does nothing."""
    if options.compile or options.checkpoint in ("full", "op"):
        return {"layer": "layers.*"}
    return {"mlp": "layers.*.feed_forward"}


def job(options: argparse.Namespace) -> JobConfig:
    """torchtitan's default configuration, but for sizes and what the options say."""
    config = JobConfig()
    config.training.local_batch_size, config.training.seq_len = options.microbatches, LENGTH
    config.parallelism.pipeline_parallel_degree = RANKS
    config.parallelism.pipeline_parallel_schedule = options.schedule
    checkpoint = config.activation_checkpoint
    checkpoint.mode, checkpoint.selective_ac_option = CHECKPOINTS[options.checkpoint]
    config.compile.enable, config.compile.components = options.compile, ["model"]
    config.compile.backend = "aot_eager"  # which takes seconds, and no compiler of C++
    return config


def build(spec: TrainSpec, options: argparse.Namespace) -> tuple[Any, list[nn.Module], bool, bool]:
    """What torchtitan's trainer builds of a spec, with the same weights every time."""
    config = job(options)
    arguments = dataclasses.replace(spec.model_args["debugmodel"])
    arguments.update_from_config(config)
    with torch.device("meta"):
        model = spec.model_cls(arguments)
    dims = ParallelDims(1, 1, 1, 1, RANKS, 1, 1, RANKS)
    loss_fn = spec.build_loss_fn(config, parallel_dims=dims)
    assert spec.pipelining_fn is not None
    made = spec.pipelining_fn(
        model, dims, config, torch.device("cpu"), arguments, spec.parallelize_fn, loss_fn
    )
    torch.manual_seed(dist.get_rank())
    for part in made[1]:
        part.to_empty(device="cpu")
        with torch.no_grad():
            part.init_weights()
        part.train()
    return made


def train(spec: TrainSpec, options: argparse.Namespace) -> list[Tensor]:
    """Losses, and this rank's parameters after a few steps."""
    schedule, parts, is_first, is_last = build(spec, options)
    parameters = [parameter for part in parts for parameter in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    seen: list[Tensor] = []
    for step in range(options.steps):
        drawn = torch.Generator().manual_seed(step)
        tokens = torch.randint(2048, (options.microbatches, LENGTH + 1), generator=drawn)
        losses: list[Tensor] = []
        schedule.step(
            *([tokens[:, :-1]] if is_first else []),
            target=tokens[:, 1:] if is_last else None,
            losses=losses if is_last else None,
            return_outputs=False,
        )
        seen += [loss.detach() for loss in losses]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(parameter.detach().clone() for parameter in parameters)]


def work(options: argparse.Namespace) -> int:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    spec = get_train_spec()
    without = train(spec, options)
    config = OffloadConfig(min_offloaded_tensor_size=1024)
    with_it = train(with_offload(spec, choose_groups(options), config), options)
    is_equal = len(without) == len(with_it) and all(map(torch.equal, without, with_it))
    manager = PipelineOffloadManager.get_instance()
    manager.reset()
    table = summary_table()  # of the last step; every rank calls it
    found: list[Any] = [None] * RANKS
    dist.all_gather_object(found, (is_equal, manager.statistics().bytes_offloaded))
    if dist.get_rank() == 0:
        print(table)
        print("offloaded, MiB by rank:", *(f"{nbytes / 2**20:.1f}" for _, nbytes in found))
        verdict = "equal bit for bit" if all(same for same, _ in found) else "DIFFERENT"
        print(f"all losses and final parameters: {verdict}", flush=True)
    dist.destroy_process_group()
    return 0 if all(same and nbytes for same, nbytes in found) else 1


def main() -> int:
    """This rank, or one process for each."""
    options = parse_arguments()
    if "RANK" in os.environ:
        return work(options)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.call([*launcher, "--nproc-per-node", str(RANKS), *sys.argv])


if __name__ == "__main__":
    sys.exit(main())
