"""A virtual run of a program moves the bytes that a run with data moves, and has the same peak.

On a device where nothing takes time, for there the copies of both are made at once: the simulated
device's order is ``eager``. Not compared are programs with bfloat16, of which a norm keeps its
statistics in float32 on ``meta``, as on accelerators, and in bfloat16 on the CPU; and those that
write to a tensor whose elements share memory, which only the CPU refuses.
"""

from __future__ import annotations

import random
import warnings
from dataclasses import replace
from math import inf
from typing import Any
from unittest.mock import patch

from helpers.fuzz.operators import COMPUTES
from helpers.fuzz.programs import Program, drawn
from helpers.fuzz.run import Machine, offload
from helpers.sessions import autograd_lets_go
from hook_overhead import no_garbage
from torch.utils._mode_utils import no_dispatch

from pp_offload.simulate import Hardware, VirtualBackend
from pp_offload.testing import SimulatedBackend

INSTANT = Hardware(
    name="instant",
    matmul_flops=inf,
    memory_bytes_per_s=inf,
    memory_bytes=1,
    link_bytes_per_s=inf,
    launch_s=0,
    copy_latency_s=0,
)

KINDS = [kind for kind in COMPUTES if kind not in ("dropout", "bfloat16")]
"""Accelerators run others in their place, which save other tensors."""

FIGURES = (
    *("host_bytes_peak", "bytes_offloaded", "bytes_reloaded", "taken_back"),
    *("prefetched_reloads", "on_demand_reloads"),
)


def forget_unseen() -> None:
    """Without counting what that computes."""
    with no_dispatch():
        autograd_lets_go()


def moved(program: Program, backend: SimulatedBackend | VirtualBackend) -> dict[str, Any]:
    with (
        no_garbage(),  # or a peak would depend on when the collector runs
        patch("helpers.fuzz.run.make_backend", lambda *kind: backend),
        patch("helpers.sessions.assert_no_hooks", lambda: None),  # it computes, on the CPU
        patch("helpers.sessions.autograd_lets_go", forget_unseen),
        patch("pp_offload.simulate.memory.ROUNDING_BYTES", 1),
        offload(program) as engine,
    ):
        results = Machine(program, engine).run()
        costs = engine.finish()
    is_virtual = isinstance(backend, VirtualBackend)
    return {name: getattr(costs, name) for name in FIGURES} | {
        "errors": [(result.where, result.error) for step in results for result in step],
        "peak": backend.memory.peak_bytes if is_virtual else backend.take_device_peak(),
    }


def test_programs_move_what_they_move_with_data() -> None:
    num_compared = num_offloaded = 0
    # Files and checksums need data, and without data no two bits can be compared.
    without = {"tiers": ("host",), "verify": False, "rematerialize": "none"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for place in range(40):
            program = drawn(random.Random(f"1 {place}"), KINDS)
            program = replace(program, backend="eager", options=program.options | without)
            with_data = moved(program, SimulatedBackend("eager"))
            if not any("more than one element" in error for _, error in with_data["errors"]):
                num_compared += 1
                num_offloaded += with_data["bytes_offloaded"] > 0
                assert moved(program, VirtualBackend(INSTANT)) == with_data, place
    assert num_compared > 20 and num_offloaded > 10
