"""One rank of torchtitan's Llama, without and with offload; run by ``test_torchtitan.py``."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from train_torchtitan import GROUPS, get_train_spec, parse_arguments, train

from pp_offload import OffloadConfig, PipelineOffloadManager
from pp_offload.integrations.torchtitan import with_offload


def compare(case: str) -> dict[str, Any]:
    """One case, such as ``layer:1F1B``; ``compiled`` may come last."""
    checkpoint, schedule, *more = case.split(":")
    options = parse_arguments(["--checkpoint", checkpoint, "--schedule", schedule])
    options.compile = bool(more)
    without = train(get_train_spec(), options)
    offloading = with_offload(
        get_train_spec(), GROUPS[options.compile], OffloadConfig(min_offloaded_tensor_size=1024)
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


def main() -> None:
    """Compare the cases named, and write what came of them."""
    out, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for case in cases:
        print(case, flush=True)  # a sign of life
        found[case] = compare(case)
    Path(out, f"{os.environ['RANK']}.pkl").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
