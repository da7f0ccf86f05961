"""A virtual run of a program moves the bytes that a run with data moves, and has the same peak.

On a device where nothing takes time, for there the copies of both are made at once: the simulated
device's order is ``eager``. Two kinds of programs say nothing. A norm in bfloat16 keeps its
statistics in float32 on ``meta``, as on accelerators, and in bfloat16 on the CPU. And writing to a
tensor whose elements share memory is refused by the CPU, and not looked at where there is no data.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, replace
from math import inf
from unittest.mock import patch

import pytest
import torch
from helpers.fuzz.draw import programs
from helpers.fuzz.engines import forget_failed_backward, offload
from helpers.fuzz.programs import Commit, Compute, Enter, Exit, Forward, Program, Step
from helpers.fuzz.run import Machine
from hypothesis import HealthCheck, Phase, given, seed, settings
from steps import no_garbage
from torch.utils._mode_utils import no_dispatch

from pp_offload.simulate import Hardware, VirtualBackend
from pp_offload.simulate.clocks import VirtualEvent
from pp_offload.simulate.memory import DeviceMemory
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


@dataclass(frozen=True)
class Moved:
    """What a program did, as far as it has to be the same."""

    said: tuple[tuple[int, str], ...]
    """By its operations."""

    peak_bytes: int
    """Of the device."""

    host_bytes_peak: int
    bytes_offloaded: int
    bytes_reloaded: int
    prefetched_reloads: int
    on_demand_reloads: int
    taken_back: int


def forget_unseen(device: torch.device) -> None:
    """Without counting what that computes."""
    with no_dispatch():
        forget_failed_backward(device)


def moved(program: Program, backend: SimulatedBackend | VirtualBackend) -> Moved:
    with (
        no_garbage(),  # or a peak would depend on when the collector runs
        patch("helpers.fuzz.engines.make_backend", lambda *kind: backend),
        patch(
            "helpers.fuzz.engines.REMATERIALIZE", "none"
        ),  # without data no two bits can be compared
        patch("helpers.fuzz.engines.assert_no_hooks", lambda: None),  # it computes, on the CPU
        patch("helpers.fuzz.engines.forget_failed_backward", forget_unseen),
        patch("pp_offload.simulate.memory.ROUNDING_BYTES", 1),
        offload(program) as engine,
    ):
        results = Machine(program, engine).run()
        found = engine.finish()
    is_virtual = isinstance(backend, VirtualBackend)
    return Moved(
        said=tuple((entry.at, entry.said) for entries in results for entry in entries),
        peak_bytes=backend.memory.peak_bytes if is_virtual else backend.take_device_peak(),
        host_bytes_peak=found.host_bytes_peak,
        bytes_offloaded=found.bytes_offloaded,
        bytes_reloaded=found.bytes_reloaded,
        prefetched_reloads=found.prefetched_reloads,
        on_demand_reloads=found.on_demand_reloads,
        taken_back=found.taken_back,
    )


def says_something(program: Program, with_data: Moved) -> bool:
    text = repr(program)
    is_refused = any("more than one element" in said for _, said in with_data.said)
    # What accelerators run instead saves other tensors.
    is_lower = "norm" in text and ("bfloat16" in text or "'half'" in text)
    return not (is_refused or is_lower or "'dropout'" in text or "'rms norm'" in text)


@dataclass
class Count:
    compared: int = 0
    different: int = 0
    offloaded: int = 0


def compare(number: int, num_programs: int) -> Count:
    """Programs drawn from a seed."""
    count = Count()

    @seed(number)
    @settings(
        max_examples=num_programs,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs())
    def run(drawn: Program) -> None:
        options = replace(drawn.options, tiers=("host",), verify=False)  # files and sums need data
        program = replace(drawn, backend="eager", options=options)
        with_data = moved(program, SimulatedBackend("eager"))
        if says_something(program, with_data):
            count.compared += 1
            count.offloaded += with_data.bytes_offloaded > 0
            count.different += moved(program, VirtualBackend(INSTANT)) != with_data

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run()
    return count


def test_programs_move_what_they_move_with_data() -> None:
    count = compare(1, 200)
    assert count.different == 0
    assert count.compared > 100 and count.offloaded > 50


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [2, 3])
def test_a_thousand_more_do(number: int) -> None:
    count = compare(number, 1000)
    assert count.different == 0
    assert count.compared > 600, "seven of ten say something"


ASKED: Counter[int] = Counter()


def ends_late(event: VirtualEvent) -> bool:
    """Only when it has been asked a few times."""
    ASKED[id(event)] += 1
    return ASKED[id(event)] > 5


FAULTS = {
    "memory is never free": (DeviceMemory, "_forget_gone", lambda memory: None),
    "memory is not counted": (DeviceMemory, "see", lambda memory, storage: None),
    "copies end late": (VirtualEvent, "query", ends_late),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_virtual_device_shows(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    body = Enter(), Compute("tanh"), Compute("tanh"), Exit(), Commit()
    program = Program(stages=((body,),), steps=(Step(ops=(Forward(), Forward())),))
    with_data = moved(replace(program, backend="eager"), SimulatedBackend("eager"))
    assert with_data.bytes_offloaded > 0
    assert moved(program, VirtualBackend(INSTANT)) != with_data
