"""Random programs compute with offload what they compute without, bit for bit."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import warnings
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fuzzer
import pytest
from helpers.fuzz import run
from helpers.fuzz.operators import COMPUTES
from helpers.fuzz.programs import Program, drawn, script
from helpers.fuzz.run import Failure, Machine, explore, offload
from helpers.sessions import autograd_lets_go, make_backend
from hook_overhead import no_garbage
from planted.faults import DEVICE
from torch.utils._mode_utils import no_dispatch

from pp_offload.simulate import Hardware, VirtualBackend
from pp_offload.testing import SimulatedBackend

NUM_PROGRAMS = 50
ROOT = Path(__file__).parents[2]

LARGEST = 16
"""The most records that the smallest program may have."""


@pytest.mark.quick(0, 1)
@pytest.mark.parametrize("seed", range(10))
def test_programs_agree(seed: int) -> None:
    counts, failure = explore(seed, NUM_PROGRAMS)
    assert failure is None, failure.script()
    assert counts["programs"] == NUM_PROGRAMS
    assert counts["offloaded"] > NUM_PROGRAMS / 3
    assert counts["computed again"] > NUM_PROGRAMS / 10


@pytest.mark.parametrize("fault", ["h2d ignores d2h", "compute ignores h2d"])
def test_a_planted_fault_is_found_and_made_small(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_faulty(kind: str, seed: int) -> object:
        backend = make_backend(kind, seed)
        if hasattr(backend, "new_stream"):
            DEVICE[fault].change(backend)
        return backend

    monkeypatch.setattr(run, "make_backend", make_faulty)
    failures = (explore(seed, 400)[1] for seed in range(1, 9))
    failure = next(f for f in failures if f and repr(f.program).count("(") <= LARGEST)
    monkeypatch.undo()
    run.check(failure.program)


def test_a_program_is_printed_as_code_that_runs() -> None:
    for seed in range(20):
        program, names = drawn(random.Random(seed)), dict[str, object]()
        exec(Failure(program, "two\nlines").script().rpartition("check(")[0], names)
        assert names["program"] == program


@pytest.mark.slow
def test_the_script_and_the_command_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "program.py"
    file.write_text(script(drawn(random.Random(0))))
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    subprocess.run([sys.executable, file], check=True, env={**os.environ, "PYTHONPATH": paths})
    assert fuzzer.main(["--programs", "5", "--seed", "3"]) == 0
    printed = capsys.readouterr().out
    assert "5 programs" in printed and "no failure; seed 3" in printed


# On a virtual device, which moves the same bytes and has the same peak

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
        patch("pp_offload.simulate.device.ROUNDING_BYTES", 1),
        offload(program) as engine,
    ):
        results = Machine(program, engine).run()
        costs = engine.finish()
    is_virtual = isinstance(backend, VirtualBackend)
    return {name: getattr(costs, name) for name in FIGURES} | {
        "errors": [(result.where, result.error) for step in results for result in step],
        "peak": backend.memory.peak_bytes if is_virtual else backend.take_device_peak(),
    }


def test_programs_move_without_data_what_they_move_with_it() -> None:
    """On a device where nothing takes time, for there the copies of both are made at once: the
    simulated device's order is ``eager``. Not compared are programs with bfloat16, of which a norm
    keeps its statistics in float32 on ``meta``, as on accelerators, and in bfloat16 on the CPU; and
    those that write to a tensor whose elements share memory, which only the CPU refuses.
    """
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
