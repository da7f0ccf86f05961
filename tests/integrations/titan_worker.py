"""One rank of torchtitan's Llama, without and with offload; run by ``test_torchtitan.py``."""

from __future__ import annotations

import os

from helpers.ranks import run_cases
from train_torchtitan import compare, parse_arguments

os.environ["LOCAL_RANK"] = "0"  # torchtitan asks for it; there is one CPU


def compare_case(case: str) -> tuple[bool, int]:
    """A case is the arguments of the example."""
    return compare(parse_arguments(case.split()))


if __name__ == "__main__":
    run_cases(compare_case)
