"""Ranks, and the end of a process: F59 and F68."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from helpers.processes import run_each
from helpers.sessions import assert_idle, begin_microbatch, gradients, session
from helpers.toy import batches, make_model, run_step, same_bits
from torch import Tensor

from pp_offload.backends import CpuBackend

PROLOGUE = f"""
import atexit, logging, os, sys, threading, traceback
import torch
import torch.distributed as dist
torch.set_num_threads(1)
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from helpers.toy import batches, make_model, run_step, same_bits
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import CpuBackend, OffloadConfig, OffloadError, PipelineOffloadManager
from pp_offload import summary, summary_table
from pp_offload.testing import SimulatedBackend
"""
SETUP = """
kind = {kind!r}
config = OffloadConfig(
    min_offloaded_tensor_size=1, tiers=("disk",), disk_dir=folder, max_in_flight_bytes=40_000
)
backend = CpuBackend(inline_bytes=0) if kind == "cpu" else SimulatedBackend(kind)
manager = PipelineOffloadManager(config=config, backend=backend)
PipelineOffloadManager.OFFLOAD_MGR = manager
model, plain = make_model(width=32), make_model(width=32, groups=())

def is_right(step):
    inputs = batches(4, 32, step, length=9 + step)
    expected = run_step(plain, inputs, in_flight=2, offload=False)
    return same_bits(run_step(model, inputs, in_flight=2), expected)

def forward(step=0):
    off_interface.init_chunk_handler(None, None, 1)
    return model(batches(1, 32, step)[0]).sum()
"""

TABLE = r"""
logging.disable()  # of the warning before
summary.WARN_S, summary.PATIENCE_S = 0.2, 0.5

def asked():
    try:
        return summary_table()
    except OffloadError as failure:
        return str(failure)

pid = os.fork()
number = int(pid == 0)
dist.init_process_group(
    "gloo", init_method="file://" + folder + "/store", rank=number, world_size=2
)
store = dist.distributed_c10d._get_default_store()
if number == 1:
    store.wait(["given up"])
# A line in one write: the two ranks share a file, and print may write word by word.
sys.stdout.write(f"{number} {asked().split(';')[0]}\n")
sys.stdout.flush()
store.set("given up", "")
summary.PATIENCE_S = 300
sys.stdout.write(f"{number} {'mix' in asked()} {'total MiB' in asked()}\n")
sys.stdout.flush()
dist.destroy_process_group()
if number == 1:
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
"""
"""The rank that asks alone raises, and so does one that asks later; then both have their table."""

END = """
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
"""
"""Graphs alive, copies under way, a thread and an exit handler that still train."""

PROGRAMS: dict[str, tuple[str, str, list[str]]] = {
    "table": (
        TABLE,
        "cpu",
        [
            "0 False True",
            "0 the table was asked for on rank 0, and ranks [1] did not ask for it within 0.5 s",
            "1 False True",
            "1 the table was asked for on rank 1, and another rank has given up waiting for this"
            " one",
        ],
    ),
    "end": (END, "cpu", ["True", "True True", "True True True"]),
    "simulated end": (END, "late", ["True"]),
}
"""Each with its device, and the sorted lines that it prints."""


@pytest.mark.field("F59")
@pytest.mark.field("F68")
def test_processes_that_ask_and_end(tmp_path: Path) -> None:
    programs = {name: SETUP.format(kind=kind) + code for name, (code, kind, _) in PROGRAMS.items()}
    for name, lines in run_each(programs, tmp_path, PROLOGUE).items():
        lines = [line for line in lines if not line.startswith("[")]  # of gloo
        assert sorted(lines) == PROGRAMS[name][2], name


@pytest.mark.field("F59")
def test_a_loop_that_never_calls_reset(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not grow, and says so once; the numbers stay right, also behind a late reset."""
    monkeypatch.setattr("pp_offload._groups.manager.MANY_CHUNKS", 100)
    with session(CpuBackend()) as manager:
        model, plain = make_model(layers=1), make_model(layers=1, groups=())
        (x,) = batches(1)
        expected = run_step(plain, [x], offload=False)
        waiting: list[tuple[Tensor, Tensor]] = []
        counts = []
        for number in range(600):
            begin_microbatch()
            leaf = x.clone().requires_grad_()
            waiting.append((model(leaf).square().mean(), leaf))
            if len(waiting) == 3:
                loss, leaf = waiting.pop(0)
                loss.backward()
                got = [loss.detach(), *gradients(leaf, *model.parameters())]
                assert same_bits(got, expected)
            if number % 100 == 99:
                gc.collect()
                counts.append(len(gc.get_objects()))
        # Up to a hundred chunks are kept for the plan, so the first counts are before the bound.
        assert max(counts[2:]) - min(counts[2:]) < 100 * 29
        assert counts[-1] - counts[3] < 500
        assert caplog.text.count("since the last reset()") == 1
        waiting.clear()
        del loss, leaf
        assert same_bits(run_step(model, [x]), expected)
        manager.reset()
        assert_idle(manager)
