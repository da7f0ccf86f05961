"""Threads, signals, interrupts, ranks, and the end of a process: F54 to F57, F59 and F68."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from helpers.injected import Injected, chosen, files, interrupt_at, points_in
from helpers.processes import run_each
from helpers.sessions import (
    assert_idle,
    assert_same,
    begin_microbatch,
    begin_step,
    drawn,
    frequent_switches,
    gradients,
    group,
    session,
)
from helpers.threaded import KINDS, Lockstep, at_once, manager_of, settled
from helpers.toy import WIDTH, Net, batches, inputs, make_model, run_step, same_bits
from torch import Tensor, nn

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import GroupStateError, OffloadActivations, PipelineOffloadManager, offload_modules
from pp_offload._hooks import all_packs
from pp_offload.backends import CpuBackend

Graph = tuple[Net, Tensor, Tensor]
"""A model, its input and its loss."""


def forward(seed: int, step: int, is_on: bool = True) -> Graph:
    """A microbatch of its own; the number of rows is another in each step."""
    net = Net(seed=seed)
    net.is_on = is_on
    (leaf,) = inputs(1, step=step, rows=1 + (7 * step + 3 * seed) % 40)
    begin_microbatch(is_on)
    return net, leaf.requires_grad_(), net(leaf).square().mean()


def backward(graph: Graph) -> list[Tensor]:
    net, leaf, loss = graph
    loss.backward()
    return gradients(leaf, *net.parameters())


def check_backward(graph: Graph, seed: int, step: int) -> None:
    assert_same(backward(graph), backward(forward(seed, step, False)), f"{seed} in step {step}")


# F54: threads through one manager


@pytest.mark.field("F54")
@pytest.mark.parametrize("kind", KINDS)
def test_every_thread_with_steps_of_its_own(kind: str, tmp_path: Path) -> None:
    """A ``reset`` inside the step of another names the threads, and changes nothing."""
    refusals: list[tuple[int, str]] = []

    def run(seed: int) -> None:
        for step in range(12):
            try:
                off_interface.reset()
            except GroupStateError as refusal:
                refusals.append((threading.get_ident(), str(refusal)))
            check_backward(forward(seed, step), seed, step)

    with frequent_switches(), manager_of(kind, tmp_path) as manager:
        at_once([partial(run, seed) for seed in range(4)])
        assert all(str(ident) in text for ident, text in refusals)
        manager.reset()
        before = manager.statistics().bytes_offloaded
        check_backward(forward(0, 1), 0, 1)
        assert manager.statistics().bytes_offloaded > before
        settled(manager)
        assert_idle(manager)


# F55: evaluation beside training


class Part(nn.Module):
    """May be a group; stops in the middle, where its thread is told to."""

    def __init__(self, pause: Callable[[], object], is_marked: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(drawn(WIDTH, WIDTH))
        self.pause, self.is_marked = pause, is_marked

    def forward(self, x: Tensor) -> Tensor:
        return group(x, self.compute, self.is_marked)

    def compute(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.weight)
        self.pause()
        return y.sin().exp()


@pytest.mark.field("F55")
@pytest.mark.parametrize("without_grad", [torch.no_grad, torch.inference_mode, None])
@pytest.mark.parametrize("is_marked", [True, False], ids=["markers", "modules"])
def test_evaluation_beside_training(is_marked: bool, without_grad: Any, tmp_path: Path) -> None:
    """The forwards of both meet inside every group, and go on in any order.

    With grad and without a chunk, the second forward is told so, in its own thread.
    """
    barrier = Lockstep(1)
    model = nn.Sequential(*(Part(lambda: barrier.wait(), is_marked) for _ in range(2)))
    x, other = inputs(2)
    scope = nullcontext() if is_marked else offload_modules(model, {"part": "*"})

    def train() -> list[Tensor]:
        begin_step()
        leaf = x.clone().requires_grad_()
        model(leaf).square().sum().backward()
        return gradients(leaf, *model.parameters())

    def evaluate() -> list[Tensor]:
        if without_grad is not None:
            with without_grad():
                return [model(other).clone()]
        with pytest.raises(GroupStateError, match="init_chunk_handler"):
            model(other)
        barrier.wait()
        barrier.wait()
        return []

    with frequent_switches(), manager_of("copy threads", tmp_path) as manager, scope:
        right = train()
        with torch.no_grad():
            output = model(other)
        before = manager.statistics().bytes_offloaded
        train()
        alone = manager.statistics().bytes_offloaded - before
        for _ in range(20):
            barrier, before = Lockstep(2), manager.statistics().bytes_offloaded
            grads, seen = at_once([train, evaluate], barrier)
            assert_same(grads, right)
            assert_same(seen, [output] if without_grad else [])
            assert manager.statistics().bytes_offloaded - before == alone > 0
        manager.reset()
        settled(manager)
        assert_idle(manager)


# F56: signals in backward. Behind one, a destructor or the callback of a weak reference must not be
# the first Python code: what the handler raises there is forgotten.


class Program:
    """Trains with groups, or in the context; ``owner`` is whose statistics are to be zero."""

    def __init__(self, kind: str, manager: PipelineOffloadManager) -> None:
        self.owner: Any = manager
        self.scope: Any = nullcontext()
        self.has_groups = kind != "context"
        if not self.has_groups:
            options = {"min_offload_size": 1, "max_fwd_stash_size": 3, "config": manager.config}
            self.owner = self.scope = OffloadActivations(**options)

    def begin(self) -> None:
        if self.has_groups:
            self.owner.reset()
        with self.scope:
            pass

    def forward(self, seed: int, step: int) -> Graph:
        with self.scope:
            return forward(seed, step, self.has_groups)

    def step(self, number: int, graphs: list[Any]) -> None:
        """Two microbatches, whose backwards are right; ``graphs`` are those still to come."""
        self.begin()
        for seed in range(2):
            graphs.append((self.forward(seed, number), seed, number))
        for _ in range(2):
            check_backward(*graphs.pop(0))

    def check(self, number: int) -> None:
        """A step is right, and nothing is left."""
        self.step(number, [])
        self.begin()
        settled(self.owner)
        assert_idle(self.owner)


@contextmanager
def program_of(kind: str, directory: Path) -> Iterator[Program]:
    with manager_of(kind if kind in KINDS else "copy threads", directory) as manager:
        yield Program(kind, manager)


@contextmanager
def calls_seen() -> Iterator[list[tuple[str, str]]]:
    """Python functions called by this thread, with who called; not by the garbage of others."""
    seen: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_back is not None:
            name = f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"
            if __name__ not in name and not name.startswith("contextlib."):
                seen.append((name, frame.f_back.f_code.co_name))

    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)
        gc.enable()


@pytest.mark.field("F56")
@pytest.mark.parametrize("kind", [*KINDS, "context"])
def test_no_python_code_where_autograd_frees_what_it_saved(kind: str, tmp_path: Path) -> None:
    """A graph that dies calls nothing; a backward calls the unpack hook, and no destructor."""
    with program_of(kind, tmp_path) as program:
        for _ in range(2):
            program.begin()
            loss = program.forward(0, 5)[2]
            with calls_seen() as seen:
                del loss
            assert not seen
        program.begin()
        loss = program.forward(0, 5)[2]
        with calls_seen() as seen:
            loss.backward()
        called = {name for name, caller in seen if caller == "_engine_run_backward"}
        kinds = ("Resident", "Saved", "Wrapped")
        assert {name for name in called if "pp_offload" in name} <= {
            f"pp_offload._core.saved.{saved}.unpack" for saved in kinds
        }
        ends = ("__del__", "<locals>._remove", "<locals>.remove", "finalize.__call__")
        assert not [name for name, _ in seen if name.endswith(ends)]


# F57: an interrupt at any line

LINES = files("_core/*", "_groups/*", "_megatron/*", "_activations")


@pytest.mark.field("F57")
@pytest.mark.parametrize(
    ("kind", "every"),
    [
        *((kind, 60) for kind in ("host", "disk", "context")),
        *(pytest.param(kind, 8, marks=pytest.mark.slow) for kind in (*KINDS, "context")),
        *(pytest.param(kind, 1, marks=pytest.mark.exhaustive) for kind in (*KINDS, "context")),
    ],
)
def test_an_interrupt_at_some_lines(kind: str, every: int, tmp_path: Path) -> None:
    """No hook stays, older graphs are right, and so are the next steps."""
    with program_of(kind, tmp_path) as program:
        program.check(0)
        points = chosen(points_in(LINES, lambda: program.step(1, [])), every=every)
    assert len(points) > 200 // every
    wrong: list[str] = []
    for point in points:
        with program_of(kind, tmp_path) as program:
            program.check(0)
            older: list[Any] = []
            graph: Any = None
            try:
                with interrupt_at(point.number, LINES) as interrupted:
                    program.step(1, older)
                # Copies end sooner or later, so not every run is of the same length.
                if interrupted:
                    wrong.append(f"{point}: the exception is lost")
            except Injected:
                if all_packs():  # while it is handled, and keeps frames alive
                    wrong.append(f"{point}: hooks are left")
            try:
                program.step(2, [])
                for graph in older:
                    check_backward(*graph)
                del graph
                older.clear()
                program.check(3)
            except BaseException as error:
                wrong.append(f"{point}: {type(error).__name__}: {str(error)[:150]}")
    if wrong:
        pytest.fail("\n".join([f"{len(wrong)} of {len(points)} lines", *wrong]), pytrace=False)


# Ranks, and the end of a process: F59 and F68


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
