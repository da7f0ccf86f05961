"""One rank of torchtitan's Llama, without and with offload; run by ``test_torchtitan.py``."""

from __future__ import annotations

import os
from typing import Any

import train_torchtitan
from helpers.ranks import run_cases

os.environ["LOCAL_RANK"] = "0"  # torchtitan asks for it; there is one CPU
train_torchtitan.LENGTH = 16  # of sequences
debug_model = train_torchtitan.llama3_debugmodel


def compare(case: str) -> tuple[bool, int]:
    """A case is the arguments of the example."""
    options = train_torchtitan.parse_arguments(["--steps", "2", *case.split()])

    def config_of_few_layers() -> Any:
        config = debug_model()
        del config.model_spec.model.layers[4 if "Interleaved" in case else 2 :]
        return config

    train_torchtitan.llama3_debugmodel = config_of_few_layers
    return train_torchtitan.compare(options)


if __name__ == "__main__":
    run_cases(compare)
