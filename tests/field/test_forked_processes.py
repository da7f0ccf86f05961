"""F58: a forked process trains, or names the two processes that are mixed up; it never hangs."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import processes
import pytest

pytestmark = pytest.mark.field("F58")

TESTS = Path(__file__).parent.parent

PROLOGUE = """
import os, sys, threading, traceback
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from toy import batches, make_model, run_step, same_bits
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import CpuBackend, ForkedError, OffloadConfig, PipelineOffloadManager, configure
from pp_offload.testing import SimulatedBackend

directory, tiers, kind = sys.argv[2], tuple(sys.argv[3].split("+")), sys.argv[4]
config = OffloadConfig(
    min_offloaded_tensor_size=1, tiers=tiers, disk_dir=directory if "disk" in tiers else None,
    max_in_flight_bytes=40_000,
)
backend = CpuBackend(inline_bytes=0) if kind == "cpu" else SimulatedBackend(kind)
PipelineOffloadManager.OFFLOAD_MGR = PipelineOffloadManager(config=config, backend=backend)
model, plain = make_model(width=32), make_model(width=32, groups=())

def is_right(step):
    inputs = batches(4, 32, step, length=9 + step)
    expected = run_step(plain, inputs, in_flight=2, offload=False)
    return same_bits(run_step(model, inputs, in_flight=2), expected)

def graph():
    off_interface.reset()
    off_interface.init_chunk_handler(None, None, 1)
    return model(batches(1, 32)[0]).sum()

def in_child(work):
    '''What a forked process says.'''
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
"""


def run(code: str, tmp_path: Path, tiers: str, kind: str) -> list[str]:
    """What the program prints."""
    directory, said = tmp_path / "disk", tmp_path / "said"
    directory.mkdir()
    said.mkdir()
    program = textwrap.dedent(PROLOGUE) + textwrap.dedent(code)
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        program,
        str(TESTS),
        str(directory),
        tiers,
        kind,
    ]
    result = processes.run(command, said)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines()


on_tiers = pytest.mark.parametrize(
    ("tiers", "kind"),
    [
        ("host", "cpu"),
        pytest.param("disk", "cpu", marks=pytest.mark.slow),
        pytest.param("host", "late", marks=pytest.mark.slow),
        ("disk", "late"),
        ("disk", "eager"),
    ],
)


@on_tiers
def test_a_forked_process_trains_at_once(tmp_path: Path, tiers: str, kind: str) -> None:
    said = run(
        """
        assert is_right(0) and is_right(1)
        living = graph()
        def work():
            manager = PipelineOffloadManager.get_instance()
            assert manager.config == config
            print(is_right(0), is_right(2), manager.statistics().bytes_offloaded > 0)
            print(manager.statistics().disk_bytes_in_use, manager.statistics().host_bytes_in_use)
        print(in_child(work))
        living.backward()
        model.zero_grad()
        print(is_right(1))
        """,
        tmp_path,
        tiers,
        kind,
    )
    assert said == ["True True True", "0 0", "0", "True"]


@pytest.mark.quick("host")
@on_tiers
def test_a_graph_of_the_other_process_raises(tmp_path: Path, tiers: str, kind: str) -> None:
    said = run(
        """
        assert is_right(0)
        living, parent = graph(), os.getpid()
        def work():
            try:
                living.backward()
            except ForkedError as error:
                print(str(parent) in str(error) and str(os.getpid()) in str(error))
            print(is_right(1))
        print(in_child(work))
        model.zero_grad()
        living.backward()
        got = [p.grad.clone() for p in model.parameters()]
        plain(batches(1, 32)[0]).sum().backward()
        print(same_bits(got, [p.grad for p in plain.parameters()]))
        """,
        tmp_path,
        tiers,
        kind,
    )
    assert said == ["True", "True", "0", "True"]


@pytest.mark.parametrize("tiers", ["host", "disk"])
def test_fork_while_copies_and_writes_are_under_way(tmp_path: Path, tiers: str) -> None:
    """They never end in the forked process; nobody there waits for them."""
    said = run(
        """
        gate = threading.Event()
        manager = PipelineOffloadManager.get_instance()
        manager.backend.d2h.submit(gate.wait)
        if "disk" in tiers:
            for _ in range(4):
                manager.offloader.engine.mover.tier.disk._threads.submit(gate.wait)
        living = graph()
        def work():
            global living, manager
            print(is_right(0))
            old = manager
            manager = None
            try:
                living.backward()
            except ForkedError:
                print("refused")
            del old
            living = None
            print(is_right(1))
        code = in_child(work)
        gate.set()
        living.backward()
        model.zero_grad()
        print(code, is_right(2))
        """,
        tmp_path,
        tiers,
        "cpu",
    )
    assert said == ["True", "refused", "True", "0 True"]


@pytest.mark.quick("host")
@pytest.mark.parametrize("tiers", ["host", "disk"])
def test_workers_that_load_data_do_no_harm(tmp_path: Path, tiers: str) -> None:
    said = run(
        """
        from torch.utils.data import DataLoader
        loader = DataLoader(batches(6, 32), batch_size=None, num_workers=2)
        for epoch in range(2):
            living = graph()
            for x in loader:
                off_interface.reset()
                got = run_step(model, [x])
                assert same_bits(got, run_step(plain, [x], offload=False))
            living.backward()
            model.zero_grad()
        print(PipelineOffloadManager.get_instance().statistics().host_bytes_in_use)
        print(len(os.listdir(directory)))
        """,
        tmp_path,
        tiers,
        "cpu",
    )
    assert said == ["0", "0"]


@pytest.mark.slow
def test_a_child_of_a_child_trains_too(tmp_path: Path) -> None:
    said = run(
        """
        assert is_right(0)
        def work():
            assert is_right(1)
            print(in_child(lambda: print(is_right(2))))
            print(is_right(0))
        print(in_child(work))
        """,
        tmp_path,
        "disk",
        "cpu",
    )
    assert said == ["True", "0", "True", "0"]


def test_threads_begin_anew(tmp_path: Path) -> None:
    """Those of the other process are not here: what is queued would wait for ever."""
    said = run(
        """
        from pp_offload._common.workers import Workers
        workers = Workers("some")
        print(workers.submit(lambda: 1).result())
        def work():
            piece = workers.submit(lambda: 2)
            assert any(thread.is_alive() for thread in workers._threads)
            print(piece.result())
        print(in_child(work))
        """,
        tmp_path,
        "host",
        "cpu",
    )
    assert said == ["1", "2", "0"]


def test_a_context_made_before(tmp_path: Path) -> None:
    """Unused, used, or with a graph alive: in the child it begins anew."""
    said = run(
        """
        from pp_offload import OffloadActivations
        unused, used = (OffloadActivations(min_offload_size=1, backend=backend) for _ in "ab")
        x, = batches(1, 32)
        expected = run_step(plain, [x], offload=False)
        def is_context_right(context):
            leaf = x.clone().requires_grad_()
            with context:
                loss = plain(leaf).square().mean()
            loss.backward()
            found = [loss.detach(), leaf.grad] + [p.grad.clone() for p in plain.parameters()]
            plain.zero_grad()
            return same_bits(found, expected) and context.statistics().bytes_offloaded > 0
        print(is_context_right(used))
        with used:
            living = plain(x).square().mean()
        def work():
            print(is_context_right(unused), is_context_right(used), is_context_right(used))
            try:
                living.backward()
            except ForkedError as error:
                print("forked" in str(error))
        print(in_child(work))
        living.backward()
        """,
        tmp_path,
        "host",
        "cpu",
    )
    assert said == ["True", "True True True", "True", "0"]
