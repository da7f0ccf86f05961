"""Ranks, forked processes, and the end of a process: F22, F58, F59, F68."""

from __future__ import annotations

import gc
import sys
import textwrap
from pathlib import Path

import pytest
from helpers import processes
from helpers.scenarios import begin, manager_on
from helpers.sessions import gradients
from helpers.toy import assert_idle, batches, make_model, run_step, same_bits
from torch import Tensor

from pp_offload.backends import CpuBackend

PROLOGUE = """
import os, sys, threading, traceback
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from helpers.toy import batches, make_model, run_step, same_bits
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import CpuBackend, ForkedError, OffloadConfig, PipelineOffloadManager
from pp_offload.testing import SimulatedBackend

directory, tier, kind = sys.argv[2:5]
config = OffloadConfig(
    min_offloaded_tensor_size=1, tiers=(tier,), disk_dir=directory if tier == "disk" else None,
    max_in_flight_bytes=int(sys.argv[5]),
)
backend = CpuBackend(inline_bytes=0) if kind == "cpu" else SimulatedBackend(kind)
manager = PipelineOffloadManager(config=config, backend=backend)
PipelineOffloadManager.OFFLOAD_MGR = manager
disk = manager.offloader.engine.mover.tier.disk if tier == "disk" else None
model, plain = make_model(width=32), make_model(width=32, groups=())

def is_right(step):
    inputs = batches(4, 32, step, length=9 + step)
    expected = run_step(plain, inputs, in_flight=2, offload=False)
    return same_bits(run_step(model, inputs, in_flight=2), expected)

def forward(step=0):
    off_interface.init_chunk_handler(None, None, 1)
    return model(batches(1, 32, step)[0]).sum()

def graph():
    off_interface.reset()
    return forward()

def in_child(work):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


gate = threading.Event()
"""


def printed_by(
    code: str, tmp_path: Path, tier: str = "disk", kind: str = "cpu", in_flight: int = 40_000
) -> list[str]:
    """The lines that a program prints, which writes no error."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").mkdir()
    program = textwrap.dedent(PROLOGUE) + textwrap.dedent(code)
    arguments = [Path(__file__).parent.parent, tmp_path / "disk", tier, kind, in_flight]
    command = [sys.executable, "-W", "ignore", "-c", program, *map(str, arguments)]
    result = processes.run(command, tmp_path / "out")
    assert (result.returncode, result.stderr) == (0, ""), result.stdout + result.stderr
    return result.stdout.splitlines()


# F68: a table that not all ranks ask for


@pytest.mark.field("F68")
def test_ranks_that_do_not_ask_for_the_table_are_named(tmp_path: Path) -> None:
    """The one that asks raises, and so does one that asks later; then both have their table."""
    code = """
        import torch.distributed as dist
        import logging
        import pp_offload.summary as summary
        from pp_offload import OffloadError, summary_table
        logging.disable()  # of the warning before
        summary.WARN_S, summary.PATIENCE_S = 0.2, 0.5
        def asked():
            try:
                return summary_table()
            except OffloadError as failure:
                return str(failure)
        def rank(number):
            dist.init_process_group(
                "gloo", init_method="file://" + directory + "/store", rank=number, world_size=2
            )
            store = dist.distributed_c10d._get_default_store()
            if number == 1:
                store.wait(["given up"])
            # A line in one write: the two ranks share a file, and print may write word by word.
            sys.stdout.write(f"{number} {asked().split(';')[0]}\\n")
            store.set("given up", "")
            summary.PATIENCE_S = 300
            sys.stdout.write(f"{number} {'mix' in asked()} {'total MiB' in asked()}\\n")
            dist.destroy_process_group()
        pid = os.fork()
        rank(int(pid == 0))
        sys.stdout.flush()
        if pid == 0:
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        """
    lines = [line for line in printed_by(code, tmp_path, "host") if line[:2] in ("0 ", "1 ")]
    assert sorted(lines) == [
        "0 False True",
        "0 the table was asked for on rank 0, and ranks [1] did not ask for it within 0.5 s",
        "1 False True",
        "1 the table was asked for on rank 1, and another rank has given up waiting for this one",
    ]


# F58: forked processes


@pytest.mark.field("F58")
@pytest.mark.parametrize("tier", ["disk"])
def test_fork_while_copies_and_writes_are_under_way(tmp_path: Path, tier: str) -> None:
    """They never end in the forked process, whose threads begin anew."""
    lines = printed_by(
        """
        manager.backend.d2h.submit(gate.wait)
        if disk is not None:
            for _ in range(4):
                disk._threads.submit(gate.wait)
        living = graph()
        def work():
            global living, manager
            print(is_right(0))
            manager = None
            try:
                living.backward()
            except ForkedError:
                print("refused")
            living = None
            print(is_right(1))
        code = in_child(work)
        gate.set()
        living.backward()
        model.zero_grad()
        print(code, is_right(2))
        """,
        *(tmp_path, tier),
    )
    assert lines == ["True", "refused", "True", "0 True"]


# F59: the end of a process, and a loop without a reset


@pytest.mark.field("F59")
@pytest.mark.parametrize("kind", ["cpu", "late"])
def test_a_process_ends_with_its_program(tmp_path: Path, kind: str) -> None:
    """Graphs alive, copies under way, a thread and an exit handler that still train."""
    lines = printed_by(
        """
        import atexit
        print(is_right(0))
        graphs = [forward(step) for step in range(4)]
        cycle = [manager, graphs]
        cycle.append(cycle)
        def train():
            threading.main_thread().join()  # the program is over, the process is not
            print(is_right(0), is_right(1), manager.statistics().disk_bytes_written > 0)
        if kind == "cpu":
            atexit.register(lambda: print(is_right(0), is_right(1)))
            threading.Thread(target=train).start()
        """,
        *(tmp_path, "disk", kind),
    )
    assert lines == ["True"] + ["True True True", "True True"] * (kind == "cpu")


def num_objects() -> int:
    """All that the garbage collector sees, without what it would collect."""
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.field("F59")
def test_a_loop_that_never_calls_reset(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not grow, and says so once; the numbers stay right, also behind a late reset."""
    monkeypatch.setattr("pp_offload._groups.manager.MANY_CHUNKS", 100)
    with manager_on(CpuBackend()) as manager:
        model, plain = make_model(layers=1), make_model(layers=1, groups=())
        (x,) = batches(1)
        expected = run_step(plain, [x], offload=False)
        waiting: list[tuple[Tensor, Tensor]] = []
        counts = []
        for number in range(600):
            begin()
            leaf = x.clone().requires_grad_()
            waiting.append((model(leaf).square().mean(), leaf))
            if len(waiting) == 3:
                loss, leaf = waiting.pop(0)
                loss.backward()
                got = [loss.detach(), *gradients(leaf, *model.parameters())]
                assert same_bits(got, expected)
            if number % 100 == 99:
                counts.append(num_objects())
        # Up to a hundred chunks are kept for the plan, so the first counts are before the bound.
        assert max(counts[2:]) - min(counts[2:]) < 100 * 29
        assert counts[-1] - counts[3] < 500
        assert caplog.text.count("since the last reset()") == 1
        waiting.clear()
        del loss, leaf
        assert same_bits(run_step(model, [x]), expected)
        manager.reset()
        assert_idle(manager)
