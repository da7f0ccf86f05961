"""F56: a signal whose handler raises during backward reaches the loop, and the next step is right.

A handler runs before the next line of Python code on the main thread. If that is a destructor, or
the callback of a weak reference, the interpreter prints the exception and forgets it. So when
autograd frees what it saved, no Python code may run.
"""

from __future__ import annotations

import ctypes
import gc
import random
import signal
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
from threaded import (
    KINDS,
    TABLE,
    AwayBackend,
    Net,
    block,
    gradients,
    input_of,
    manager_of,
    plain,
    settled,
)
from torch import Tensor
from torch.autograd.graph import Node
from toy import assert_no_hooks, same_bits

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadActivations, OffloadConfig, PipelineOffloadManager, use_backend
from pp_offload._activations.stash import ActivationStash
from pp_offload._checkpoint.recompute import Recompute
from pp_offload.backends import CpuBackend

pytestmark = pytest.mark.field("F56")

_raise = ctypes.PYFUNCTYPE(None, ctypes.c_int, ctypes.py_object)(("raise", ctypes.PyDLL(None)))
_raise_behind = ctypes.PYFUNCTYPE(None, ctypes.c_int, ctypes.py_object, ctypes.py_object)(
    ("raise", ctypes.PyDLL(None))
)
# As hooks of a node these run no Python code, so the signal is pending when it frees its tensors.
BEFORE = partial(_raise, signal.SIGUSR1)
BEHIND = partial(_raise_behind, signal.SIGUSR1)


class Interrupted(BaseException):
    """What the handler raises. Nothing of the engine or of PyTorch expects it."""


@contextmanager
def handler(number: int) -> Iterator[Counter[str]]:
    """A handler that raises; counts how often it was called."""
    calls: Counter[str] = Counter()

    def stop(*_: object) -> None:
        calls["handled"] += 1
        raise Interrupted

    before = signal.signal(number, stop)
    try:
        yield calls
    finally:
        signal.signal(number, before)


@dataclass
class Program:
    """A way to train :class:`Net`, and who offloads in it."""

    loss: Callable[[Net, Tensor], Tensor]
    """The forward of one microbatch."""

    begin: Callable[[], None]
    """Begins a step."""

    owner: PipelineOffloadManager | OffloadActivations | ActivationStash | None
    """Whose statistics are to be zero in the end."""

    def step(self, number: int) -> list[Tensor]:
        """One without interruption, in two microbatches."""
        self.begin()
        found = []
        for seed in range(2):
            model, leaf = Net(seed, is_on=False), input_of(seed, number).requires_grad_()
            self.loss(model, leaf).backward()
            found += gradients(model, leaf)
        return found

    def check(self) -> None:
        """The next two steps are right, and nothing is left."""
        for number in range(2):
            right = [one for seed in range(2) for one in plain(seed, seed, number)]
            assert same_bits(self.step(number), right)
        self.begin()
        assert_no_hooks()
        if self.owner is None:
            return
        settled(self.owner)
        statistics = self.owner.statistics()
        assert statistics.live_tensors == statistics.host_bytes_in_use == 0
        assert statistics.disk_bytes_in_use == statistics.bytes_in_flight == 0
        assert statistics.bytes_reloaded_unused == 0


def of_blocks(make: Callable[..., Tensor]) -> Callable[[Net, Tensor], Tensor]:
    """The loss of a model whose blocks are made so."""

    def loss(model: Net, x: Tensor) -> Tensor:
        for weight in model.weights:
            x = x + make(x, weight, TABLE, False)
        return x.square().mean()

    return loss


def groups(manager: PipelineOffloadManager) -> Program:
    def loss(model: Net, x: Tensor) -> Tensor:
        off_interface.init_chunk_handler(None, None, 1)
        return of_blocks(lambda x, weight, table, _: block(x, weight, table, True))(model, x)

    return Program(loss, manager.reset, manager)


def inside(context: AbstractContextManager[object]) -> Callable[[Net, Tensor], Tensor]:
    def loss(model: Net, x: Tensor) -> Tensor:
        with context:
            return of_blocks(block)(model, x)

    return loss


PROGRAMS = [*KINDS, "context", "recompute", "recompute without offload", "plain"]


@contextmanager
def program_of(kind: str, directory: Path) -> Iterator[Program]:
    """What trains in one of the ways there are."""
    if kind in KINDS:
        with manager_of(kind, directory) as manager:
            yield groups(manager)
    elif kind == "context":
        context = OffloadActivations(
            min_offload_size=1, max_fwd_stash_size=3, backend=CpuBackend(inline_bytes=0)
        )
        yield Program(inside(context), lambda: None, context)
    elif kind.startswith("recompute"):
        stash = None if "without" in kind else ActivationStash("inputs", min_offload_size=1)
        recompute = Recompute(stash)
        loss = of_blocks(partial(recompute, block))
        yield Program(loss, recompute.begin, stash)
    else:
        yield Program(of_blocks(block), lambda: None, None)


def nodes_of(loss: Tensor) -> list[Node]:
    """All nodes of the graph, in an order that depends on the graph alone."""
    found: list[Node] = []
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.append(node)
            waiting += [one for one, _ in node.next_functions]
    return found


def interrupted(program: Program, position: int, where: str) -> bool | None:
    """Whether a signal at one node arrives; None if there is no such node."""
    program.begin()
    model, leaf = Net(0, is_on=False), input_of(0, 5).requires_grad_()
    loss = program.loss(model, leaf)
    nodes = nodes_of(loss)
    if position >= len(nodes):
        return None
    if where == "before":
        nodes[position].register_prehook(BEFORE)
    else:
        nodes[position].register_hook(BEHIND)
    del nodes
    with handler(signal.SIGUSR1) as calls:
        try:
            loss.backward()
            has_arrived = False
        except Interrupted:
            has_arrived = True
    assert calls["handled"] == 1
    return has_arrived


def unraisable(say: Callable[[object], None]) -> AbstractContextManager[None]:
    """What the interpreter prints and forgets is said."""

    @contextmanager
    def hooked() -> Iterator[None]:
        before, sys.unraisablehook = sys.unraisablehook, lambda one: say(one.exc_type)
        try:
            yield
        finally:
            sys.unraisablehook = before

    return hooked()


@pytest.mark.covering(1)
@pytest.mark.parametrize("where", ["before", "behind"])
@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_signal_at_every_node(kind: str, where: str, tmp_path: Path) -> None:
    """None is lost, whichever node has just been run, and the steps behind it are right."""
    swallowed: list[object] = []
    arrived: list[bool] = []
    with program_of(kind, tmp_path) as program, unraisable(swallowed.append):
        while (one := interrupted(program, len(arrived), where)) is not None:
            arrived.append(one)
            if one:
                program.check()
        assert len(arrived) > 15
        lost = [number for number, one in enumerate(arrived) if not one]
        assert not lost and not swallowed, f"{len(lost)} of {len(arrived)}: nodes {lost}"
        program.check()


@pytest.mark.parametrize("kind", [*KINDS, "context", "plain"])
def test_signals_of_a_timer(kind: str, tmp_path: Path) -> None:
    """Whenever it fires: as often as the handler was called, so often the loop is told.

    Not in checkpoints: there a weak dictionary of PyTorch may swallow one.
    """
    num_trials = 60
    drawn = random.Random(1)
    arrived = 0
    swallowed: list[object] = []
    with program_of(kind, tmp_path) as program, unraisable(swallowed.append):
        program.step(0)
        begin = time.perf_counter()
        program.step(0)
        whole = time.perf_counter() - begin
        with handler(signal.SIGALRM) as calls:
            for trial in range(num_trials):
                program.begin()
                model, leaf = Net(0, is_on=False), input_of(0, 5).requires_grad_()
                loss = program.loss(model, leaf)
                try:
                    signal.setitimer(signal.ITIMER_REAL, drawn.uniform(1e-5, whole))
                    loss.backward()
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except Interrupted:
                    arrived += 1
                del loss
                if trial % 10 == 0:
                    program.check()
        why = f"{arrived} of {calls['handled']}, and what the interpreter forgot: {swallowed}"
        assert arrived == calls["handled"] and not swallowed, why
        program.check()


# No Python code in destructors


class Call(NamedTuple):
    """A Python function that was called."""

    name: str
    caller: str


@contextmanager
def calls_seen() -> Iterator[list[Call]]:
    """Python functions called by this thread, except by the garbage of others."""
    seen: list[Call] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_back is not None:
            name = f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"
            seen.append(Call(name, frame.f_back.f_code.co_name))

    gc.collect()
    gc.disable()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(before)
        gc.enable()
        seen[:] = [call for call in seen if __name__ not in call.name and call.caller != "__exit__"]
        if seen and seen[-1].name.startswith("contextlib."):
            seen.pop()  # this context's own end


@contextmanager
def watched(kind: str, directory: Path) -> Iterator[Program]:
    """The same with what else keeps books on tensors: verification and marks."""
    if kind == "staged, verified":
        config = OffloadConfig(
            min_offloaded_tensor_size=1, tiers=("disk",), disk_dir=directory, verify=True
        )
        with use_backend(AwayBackend(), config=config) as manager:
            yield groups(manager)
    elif kind == "marked":
        with manager_of("host", directory) as manager:
            program = groups(manager)

            def loss(model: Net, x: Tensor) -> Tensor:
                h = x * 2
                manager.mark_not_offloadable(h)
                return program.loss(model, h / 2)

            yield Program(loss, program.begin, manager)
    else:
        with program_of(kind, directory) as program:
            yield program


WATCHED = [*KINDS, "staged, verified", "marked", "context", "recompute"]


@pytest.mark.parametrize("kind", [*WATCHED, "recompute without offload", "plain"])
def test_no_python_code_when_a_graph_dies(kind: str, tmp_path: Path) -> None:
    """Neither destructors nor callbacks of weak references, whoever wrote them."""
    with watched(kind, tmp_path) as program:
        for _ in range(2):
            program.begin()
            model, leaf = Net(0, is_on=False), input_of(0, 5).requires_grad_()
            loss = program.loss(model, leaf)
            with calls_seen() as seen:
                del loss
            assert [call.name for call in seen] == []
            del model, leaf


ENDS = (
    "__del__",
    "<locals>.remove",
    "<locals>._remove",
    "finalize.__call__",
    "_add.<locals>.<lambda>",
)
"""How functions are called that run when something dies."""


def ends_in_backward(program: Program) -> set[str]:
    """Destructors and callbacks that run in a backward, which of ours calls hooks only."""
    program.begin()
    model, leaf = Net(0, is_on=False), input_of(0, 5).requires_grad_()
    loss = program.loss(model, leaf)
    with calls_seen() as seen:
        loss.backward()
    called = {call.name for call in seen if call.caller == "_engine_run_backward"}
    assert {name for name in called if "pp_offload" in name} <= {
        f"pp_offload._core.saved.{kind}.unpack" for kind in ("Resident", "Saved", "Wrapped")
    }
    return {call.name for call in seen if call.name.endswith(ENDS)}


@pytest.mark.parametrize("kind", WATCHED)
def test_no_destructor_in_backward(kind: str, tmp_path: Path) -> None:
    """Backward calls the unpack hook and nothing else, and no destructor runs inside it."""
    others: set[str] = set()
    if kind == "recompute":  # PyTorch has a weak dictionary of its own there
        with watched("recompute without offload", tmp_path) as program:
            others = ends_in_backward(program)
    with watched(kind, tmp_path) as program:
        assert ends_in_backward(program) <= others
        program.check()


@pytest.mark.parametrize("kind", ["disk", "context"])
def test_a_torn_engine_ends_between_steps(kind: str, tmp_path: Path) -> None:
    """Not where garbage is collected, which may be in a backward: it has destructors."""
    with program_of(kind, tmp_path) as program:
        program.step(0)
        owner: Any = program.owner
        is_manager = isinstance(owner, PipelineOffloadManager)
        offloader = owner.offloader if is_manager else owner.stash._offloader
        mover = weakref.ref(offloader.engine.mover)
        offloader.engine.tear(Interrupted())
        gc.disable()
        try:
            program.begin()
            program.step(1)
            program.begin()
            assert mover() is None
        finally:
            gc.enable()
        program.check()


def test_hooks_without_python_code() -> None:
    """The signal is pending when they return: nothing has run its handler."""
    with handler(signal.SIGUSR1) as calls, pytest.raises(Interrupted):
        any(map(BEFORE, [None]))
        raise AssertionError("it is too late")
    assert calls["handled"] == 1
