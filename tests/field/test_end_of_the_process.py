"""F59: a process ends when its program does, and a loop that never resets keeps nothing.

At the end nothing is written for nobody, and nothing is said. A step that never ends forgets what
is over, and says so once.
"""

from __future__ import annotations

import gc
import sys
import textwrap
from pathlib import Path

import processes
import pytest
from torch import Tensor
from toy import assert_idle, batches, make_model, run_step, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadActivations, OffloadConfig, use_backend
from pp_offload._core.keys import ChunkKey
from pp_offload._memory.disk_file import NUM_THREADS
from pp_offload.backends import CpuBackend

pytestmark = pytest.mark.field("F59")

TESTS = Path(__file__).parent.parent

PROLOGUE = """
import os, sys, threading, time
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from toy import batches, make_model, run_step, same_bits
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import CpuBackend, OffloadConfig, PipelineOffloadManager
from pp_offload.testing import SimulatedBackend

config = OffloadConfig(
    min_offloaded_tensor_size=1, tiers=("disk",), disk_dir=sys.argv[2], max_in_flight_bytes=10**9
)
backend = CpuBackend() if sys.argv[3] == "cpu" else SimulatedBackend(sys.argv[3])
manager = PipelineOffloadManager(config=config, backend=backend)
PipelineOffloadManager.OFFLOAD_MGR = manager
disk = manager.offloader.engine.mover.tier.disk
model, plain = make_model(width=32), make_model(width=32, groups=())

def is_right(step):
    inputs = batches(4, 32, step, length=9 + step)
    expected = run_step(plain, inputs, in_flight=2, offload=False)
    return same_bits(run_step(model, inputs, in_flight=2), expected)

def forward(step=0):
    off_interface.init_chunk_handler(None, None, 1)
    return model(batches(1, 32, step)[0]).sum()

written = []
def slow(fd, data, offset):
    os.write(1, b"written\\n")  # one call, so that no other thread writes in between
    written.append(1)
    gate.wait()
    return os.pwrite(fd, data, offset)
gate = threading.Event()
"""


def run(code: str, tmp_path: Path, kind: str) -> list[str]:
    """What the program prints; it says nothing else."""
    program = textwrap.dedent(PROLOGUE) + textwrap.dedent(code)
    directory, said = tmp_path / "disk", tmp_path / "said"
    directory.mkdir()
    said.mkdir()
    result = processes.run([sys.executable, "-c", program, str(TESTS), str(directory), kind], said)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout.splitlines()


@pytest.mark.parametrize("kind", ["cpu", "eager"])
def test_what_nobody_needs_is_not_written_at_exit(tmp_path: Path, kind: str) -> None:
    said = run(
        """
        import atexit
        disk._pwrite = slow
        losses = [forward(step) for step in range(4)]
        manager.statistics()
        print("queued", disk.written_bytes // disk.in_use_bytes)
        del losses
        atexit.register(gate.set)  # so what comes last is done first
        """,
        tmp_path,
        kind,
    )
    assert said.count("queued 1") == 1
    assert said.count("written") <= NUM_THREADS, "those under way when the graphs were dropped"


def test_what_nobody_needs_is_not_written_while_training_goes_on(tmp_path: Path) -> None:
    said = run(
        """
        disk._pwrite = slow
        losses = [forward(step) for step in range(4)]
        while len(written) < 4:
            pass
        del losses
        gate.set()
        disk._threads.submit(lambda: None).result()
        print(len(written), disk.in_use_bytes)
        """,
        tmp_path,
        "cpu",
    )
    assert said == ["written"] * NUM_THREADS + [f"{NUM_THREADS} 0"]


@pytest.mark.covering(1)
@pytest.mark.quick("late")
@pytest.mark.parametrize("kind", ["cpu", "late", "eager"])
def test_a_graph_that_lives_to_the_end_says_nothing(tmp_path: Path, kind: str) -> None:
    said = run(
        """
        import gc
        print(is_right(0))
        kept = [forward(step) for step in range(4)]
        cycle = [manager, kept]
        cycle.append(cycle)
        """,
        tmp_path,
        kind,
    )
    assert said == ["True"]


def test_a_thread_that_still_trains_at_the_end(tmp_path: Path) -> None:
    said = run(
        """
        def train():
            threading.main_thread().join()  # the program is over, the process is not
            print(is_right(0), is_right(1), manager.statistics().disk_bytes_written > 0)
        threading.Thread(target=train).start()
        """,
        tmp_path,
        "cpu",
    )
    assert said == ["True True True"]


def test_a_step_in_an_exit_handler(tmp_path: Path) -> None:
    said = run(
        """
        import atexit
        atexit.register(lambda: print(is_right(0), is_right(1)))
        """,
        tmp_path,
        "cpu",
    )
    assert said == ["True True"]


def test_copies_under_way_do_not_hold_the_end_up(tmp_path: Path) -> None:
    said = run(
        """
        manager.backend.d2h.submit(gate.wait)
        manager.backend.h2d.submit(gate.wait)
        loss = forward()
        print("over")
        """,
        tmp_path,
        "cpu",
    )
    assert said == ["over"]


def num_objects() -> int:
    """All that the garbage collector sees, without what it would collect."""
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.parametrize(
    ("is_told", "in_flight"),
    [
        pytest.param(True, 1, marks=pytest.mark.exhaustive),
        pytest.param(True, 3, marks=pytest.mark.exhaustive),
        pytest.param(False, 1, marks=pytest.mark.exhaustive),
        pytest.param(False, 3, marks=pytest.mark.slow),
    ],
)
def test_a_loop_that_never_calls_reset(
    in_flight: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not grow, and says so once; the numbers stay right, also behind a late reset."""
    config = OffloadConfig(min_offloaded_tensor_size=1)
    with use_backend(CpuBackend(), config=config) as manager:
        model, plain = make_model(layers=2), make_model(layers=2, groups=())
        (x,) = batches(1)
        expected = run_step(plain, [x], offload=False)
        if is_told:
            manager.step.queue.know_order([ChunkKey(0, 0), ChunkKey(0, 1)], is_told=True)
        waiting: list[tuple[Tensor, Tensor]] = []

        def microbatch() -> list[Tensor]:
            off_interface.init_chunk_handler(None, None, 1)
            leaf = x.clone().requires_grad_()
            waiting.append((model(leaf).square().mean(), leaf))
            if len(waiting) < in_flight:
                return []
            loss, leaf = waiting.pop(0)
            loss.backward()
            found = [loss.detach(), leaf.grad, *(p.grad for p in model.parameters())]
            model.zero_grad()
            return found

        manager.reset()
        counts = []
        for number in range(5_000):
            found = microbatch()
            assert number < in_flight or same_bits(found, expected)
            if number % 1_000 == 999:
                counts.append(num_objects())
        # Up to a thousand chunks are kept for the plan, so the first count is before the bound.
        assert max(counts[1:]) - min(counts[1:]) < 1_000 * 29
        assert counts[-1] - counts[1] < 5_000
        assert sum("since the last reset()" in one.getMessage() for one in caplog.records) == 1
        waiting.clear()
        for _ in range(2):
            assert same_bits(run_step(model, [x], in_flight=1), expected)
        manager.reset()
        assert manager.step.summary
        assert_idle(manager)


@pytest.mark.parametrize("in_flight", [1, 3])
def test_a_context_entered_for_ever(in_flight: int) -> None:
    """It has no steps, and grows by nothing."""
    activations = OffloadActivations(min_offload_size=1, backend=CpuBackend())
    model = make_model(layers=1, groups=())
    (x,) = batches(1)
    waiting: list[Tensor] = []
    counts = []
    for number in range(1_200):
        with activations:
            waiting.append(model(x).square().mean())
        if len(waiting) == in_flight:
            waiting.pop(0).backward()
        if number % 400 == 399:
            counts.append(num_objects())
    assert counts[-1] - counts[0] < 200
    waiting.clear()
    assert_idle(activations)
