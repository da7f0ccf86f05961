"""One rank of torchtitan's Llama, without and with offload; run by ``test_torchtitan.py``."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
import train_torchtitan
from helpers.ranks import run_cases

os.environ["LOCAL_RANK"] = "0"  # torchtitan asks for it; there is one CPU
train_torchtitan.LENGTH = 16  # of sequences
debug_model = train_torchtitan.llama3_debugmodel


def compare(case: str) -> tuple[bool, int] | None:
    """A case is the arguments of the example; where there is one rank, it is the first."""
    options = train_torchtitan.parse_arguments(["--steps", "2", *case.split()])
    if options.ranks < dist.get_world_size():
        if dist.get_rank() > 0:
            return None
        dist.destroy_process_group()
        os.environ["WORLD_SIZE"] = "1"
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def config_of_few_layers() -> Any:
        config = debug_model()
        del config.model_spec.model.layers[4 if "Interleaved" in case else 2 :]
        return config

    train_torchtitan.llama3_debugmodel = config_of_few_layers
    return train_torchtitan.compare(options)


if __name__ == "__main__":
    run_cases(compare)
