"""One rank of torchtitan's Llama, without and with offload; run by ``test_torchtitan.py``."""

from __future__ import annotations

from typing import Any

import torch
from ranks import run_cases
from train_torchtitan import choose_groups, get_train_spec, parse_arguments, train

from pp_offload import OffloadConfig, PipelineOffloadManager
from pp_offload.integrations.torchtitan import with_offload


def compare(case: str) -> dict[str, Any]:
    """One case, such as ``layer:1F1B``; ``compiled`` may come last."""
    checkpoint, schedule, *more = case.split(":")
    options = parse_arguments(["--checkpoint", checkpoint, "--schedule", schedule])
    options.compile = bool(more)
    without = train(get_train_spec(), options)
    offloading = with_offload(
        get_train_spec(), choose_groups(options), OffloadConfig(min_offloaded_tensor_size=1024)
    )
    got = train(offloading, options)
    manager = PipelineOffloadManager.get_instance()
    statistics = manager.statistics()
    manager.reset()
    PipelineOffloadManager.reset_instance()
    return {
        "equal": len(got) == len(without) and all(map(torch.equal, got, without)),
        "tensors": len(got),
        "offloaded": statistics.bytes_offloaded,
        "in_use": statistics.host_bytes_in_use,
        "live": statistics.live_tensors,
    }


if __name__ == "__main__":
    run_cases(compare)
