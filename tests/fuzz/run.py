"""Runs a program with and without offload and compares what it computed, bit for bit.

check(program)  # raises AssertionError, with what differs

NOTE [ Changed in place ]
    Where autograd refuses a program because a saved tensor was changed in place, the engine may
    refuse it as early as at the commit, or go on with the value at save, never with the changed
    one. Which of the two happens depends on when a copy ran. A witness, which copies every tensor
    when it is saved, says what the value at save gives and where the engine may refuse.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from engines import Plain, Witness, offload
from kinds import CHANGES, COMPUTES, SHAPES, WIDTH
from programs import (
    Backward,
    Body,
    Change,
    Commit,
    Compute,
    Drop,
    Enter,
    Evaluate,
    Exit,
    Flush,
    Forward,
    Free,
    Mark,
    Peek,
    Program,
    Record,
    Region,
    Step,
    Switch,
    Synchronize,
    Touch,
)
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint

from pp_offload import OffloadStatistics, RaceError, SavedTensorModifiedError
from pp_offload._checkpoint.recompute import Recompute
from pp_offload._core.keys import ChunkKey
from pp_offload._core.tensors import flat_bytes
from pp_offload._groups.split_backward import BackwardPass

AT_END = 10**6
"""Behind all operations of a step."""

NUM_PEEKED = 6
"""Nodes of a graph that are looked into."""


class Boom(Exception):
    """What a program raises on purpose."""


class FailsInBackward(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise Boom


@dataclass(eq=False)
class Slot:
    """A microbatch on a stage, from its forward to the end of its backward."""

    stage: int
    x: Tensor
    y: Tensor
    held: list[Tensor]
    """What its forward made, if that is kept."""
    released: list[Tensor]
    """What was force-released; kept, and not looked at."""
    next_x: Tensor | None = None
    """The leaf that the next stage made of ``y``."""
    chunk: ChunkKey | None = None
    parts: list[dict[str, Any]] | None = None
    """What the weight gradients are made of, when those of the input are done."""


@dataclass
class Entry:
    """What one operation gave."""

    at: int
    said: str
    tensors: list[Tensor] = field(default_factory=list)
    is_refused: bool = False
    """Whether it was refused because a saved tensor was changed in place."""

    def differs(self, other: Entry) -> str:
        """In what; empty if in nothing."""
        if (self.at, self.said) != (other.at, other.said):
            return f"operation {self.at} said {self.said!r}, expected {other.said!r}"
        if len(self.tensors) != len(other.tensors):
            return f"operation {self.at} ({self.said}) gave another number of tensors"
        for number, (got, expected) in enumerate(zip(self.tensors, other.tensors, strict=True)):
            if not same_bits(got, expected):
                return (
                    f"operation {self.at} ({self.said}), tensor {number} is\n{got}\n"
                    f"expected\n{expected}"
                )
        return ""


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(flat_bytes(t.contiguous()) for t in (a, b)))


@dataclass
class Frame:
    """A forward that runs: its tensors, and the groups that are open."""

    tensors: list[Tensor]
    weights: list[Tensor]
    lent: Sequence[Tensor] = ()
    """Those that others need, and need whole."""
    groups: list[str] = field(default_factory=list)
    scopes: list[AbstractContextManager[object]] = field(default_factory=list)
    released: list[Tensor] = field(default_factory=list)

    def pick(self, number: int) -> Tensor:
        return self.tensors[-1 - number % len(self.tensors)]

    def close(self) -> None:
        while self.scopes:
            self.scopes.pop().__exit__(None, None, None)


# The parts of a body


def do_compute(part: Compute, frame: Frame, engine: Plain) -> None:
    a, b = frame.pick(part.a), frame.pick(part.b)
    frame.tensors.append(COMPUTES[part.kind](a, b, frame.weights))


def do_change(part: Change, frame: Frame, engine: Plain) -> None:
    engine.change(frame.pick(part.a), CHANGES[part.kind])


def do_enter(part: Enter, frame: Frame, engine: Plain) -> None:
    scope = engine.scope(part.name, part.is_function, frame.pick(0))
    scope.__enter__()
    frame.scopes.append(scope)
    frame.groups.append(part.name)


def do_exit(part: Exit, frame: Frame, engine: Plain) -> None:
    if frame.scopes:
        frame.scopes.pop().__exit__(None, None, None)


def do_commit(part: Commit, frame: Frame, engine: Plain) -> None:
    if part.name not in frame.groups:
        return
    frame.groups.remove(part.name)
    wanted = [] if part.release is None else [frame.pick(part.release)]
    released = [t for t in wanted if not any(t is one for one in frame.lent)]
    left = [t for t in frame.tensors if not any(t is one for one in released)]
    if not left:
        released, left = [], frame.tensors
    frame.tensors = left
    frame.released += released
    engine.commit(part.name, part.is_delayed, released)


def do_free(part: Free, frame: Frame, engine: Plain) -> None:
    if len(frame.tensors) > 1:
        frame.tensors.pop(-1 - part.a % len(frame.tensors))


def do_mark(part: Mark, frame: Frame, engine: Plain) -> None:
    engine.mark(frame.pick(part.a))


def do_region(part: Region, frame: Frame, engine: Plain) -> None:
    again = Again(part, len(frame.tensors), engine)
    # Weights are handed over, too: if one is changed, autograd is to notice.
    y = CHECKPOINTS[part.by](engine, part.stops)(again, *frame.tensors, *frame.weights)
    inner, again.first = again.first, None
    assert inner is not None
    if part.by != "reentrant":  # it runs without grad first, where groups are not opened
        frame.groups += inner.groups
    frame.released += inner.released
    if not any(y is one for one in frame.tensors):
        frame.tensors.append(y)


class Again:
    """A region's parts as a function, which may be called any number of times.

    Attributes:
        first: The frame of the first call, until somebody takes it away.
    """

    def __init__(self, part: Region, num_tensors: int, engine: Plain) -> None:
        self.first: Frame | None = None
        self._part = part
        self._num_tensors = num_tensors
        self._engine = engine
        self._is_first = True

    def __call__(self, *given: Tensor) -> Tensor:
        tensors, weights = given[: self._num_tensors], given[self._num_tensors :]
        frame = Frame(list(tensors), list(weights), tensors)
        is_first, self._is_first = self._is_first, False
        try:
            with self._engine.in_region():
                for part in self._part.body:
                    PARTS[type(part)](part, frame, self._engine)
        finally:
            frame.close()
        if is_first:
            # Not before: after an error nobody would take it away, and the graph that it is in
            # knows this function, a cycle that no collector sees.
            self.first = frame
        return frame.tensors[-1]


def torchs(engine: Plain, stops: bool) -> Callable[..., Tensor]:
    return partial(checkpoint, use_reentrant=False, early_stop=stops)


def torchs_reentrant(engine: Plain, stops: bool) -> Callable[..., Tensor]:
    return partial(checkpoint, use_reentrant=True)


def ours(engine: Plain, stops: bool) -> Callable[..., Tensor]:
    return Recompute(early_stop=stops)


def ours_with_stash(engine: Plain, stops: bool) -> Callable[..., Tensor]:
    """Its inputs leave."""
    return engine.recompute(stops)


CHECKPOINTS: dict[str, Callable[[Plain, bool], Callable[..., Tensor]]] = {
    "torch": torchs,
    "ours": ours,
    "stash": ours_with_stash,
    "reentrant": torchs_reentrant,
}


PARTS: dict[type[Record], Callable[[Any, Frame, Plain], None]] = {
    Compute: do_compute,
    Change: do_change,
    Enter: do_enter,
    Exit: do_exit,
    Commit: do_commit,
    Free: do_free,
    Mark: do_mark,
    Region: do_region,
}


# Kinds of backward: each says whether the microbatch is done


def whole(machine: Machine, slot: Slot) -> bool:
    slot.y.backward(machine.gradient(slot))
    return True


def retain(machine: Machine, slot: Slot) -> bool:
    slot.y.backward(machine.gradient(slot), retain_graph=True)
    return False


def of_input(machine: Machine, slot: Slot) -> bool:
    """The gradient of the input, as the schedules with a split backward do."""
    if not slot.x.requires_grad:
        return False
    found = torch.autograd.grad(
        slot.y, slot.x, machine.gradient(slot), retain_graph=True, allow_unused=True
    )
    slot.x.grad = found[0]
    return False


def of_weights(machine: Machine, slot: Slot) -> bool:
    weights = machine.weights[slot.stage]
    found = torch.autograd.grad(slot.y, weights, machine.gradient(slot), allow_unused=True)
    for weight, gradient in zip(weights, found, strict=True):
        if gradient is not None:
            weight.grad = gradient if weight.grad is None else weight.grad + gradient
    return True


def stage_input(machine: Machine, slot: Slot) -> bool:
    if not slot.x.requires_grad:
        return False
    weights = machine.weights[slot.stage]
    gradient = machine.gradient(slot)
    with machine.engine.part(slot.chunk, BackwardPass.INPUT):
        _, slot.parts = stage_backward_input([slot.y], [gradient], [slot.x], iter(weights))
    return False


def stage_weight(machine: Machine, slot: Slot) -> bool:
    parts, slot.parts = slot.parts, None
    if parts is None:
        return whole(machine, slot)
    with machine.engine.part(slot.chunk, BackwardPass.WEIGHT):
        stage_backward_weight(iter(machine.weights[slot.stage]), parts)
    return True


def double(machine: Machine, slot: Slot) -> bool:
    """Gradients of the gradient of the input."""
    if not slot.x.requires_grad:
        return whole(machine, slot)
    (first,) = torch.autograd.grad(
        slot.y, slot.x, machine.gradient(slot), create_graph=True, allow_unused=True
    )
    if first is not None and first.requires_grad:
        first.square().sum().backward()
    return True


def together(machine: Machine, slot: Slot) -> bool:
    """With all the others of the stage that can."""
    slots = [s for s in machine.slots if s.stage == slot.stage and can_backward(s)]
    torch.autograd.backward([s.y for s in slots], [machine.gradient(s) for s in slots])
    machine.slots = [s for s in machine.slots if s not in slots]
    return True


HOWS: dict[str, Callable[[Machine, Slot], bool]] = {
    "whole": whole,
    "retain": retain,
    "input": of_input,
    "weight": of_weights,
    "stage input": stage_input,
    "stage weight": stage_weight,
    "double": double,
    "together": together,
}


def can_backward(slot: Slot) -> bool:
    return slot.y.requires_grad and slot.parts is None


class Machine:
    """Runs a program on an engine.

    Args:
        program: What to run.
        engine: What its markers call.
        aborts: Operation after which a step ends, for steps that another run ended there.
    """

    def __init__(
        self, program: Program, engine: Plain, aborts: dict[int, int] | None = None
    ) -> None:
        self.program = program
        self.engine = engine
        self.slots: list[Slot] = []
        self.results: list[list[Entry]] = []
        self.num_ops = 0
        self._aborts = aborts or {}
        self._num_inputs = 0
        torch.manual_seed(program.seed)  # for what drops out
        generator = torch.Generator().manual_seed(program.seed)
        self.weights: list[list[Tensor]] = [
            [
                nn.Parameter(torch.randn(*shape, generator=generator).to(engine.device))
                for shape in SHAPES
            ]
            for _ in program.stages
        ]

    def run(self) -> list[list[Entry]]:
        """For every step, what its operations gave, and the gradients at its end."""
        for number, step in enumerate(self.program.steps):
            self.results.append([])
            if not self._run_step(number, step):
                self.slots.clear()
            self._end(step)
        self.slots.clear()
        return self.results

    def gradient(self, slot: Slot) -> Tensor:
        """That of the output: what the next stage's backward gave, or something else."""
        if slot.next_x is not None and slot.next_x.grad is not None:
            return slot.next_x.grad
        y = slot.y
        return torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)

    def _run_step(self, number: int, step: Step) -> bool:
        """Whether it came to its end."""
        at = -1
        for at, action in enumerate(self._actions(step), -1):
            self.engine.where = number, at
            self.num_ops += 1
            entry = attempt(at, action)
            self.results[-1].append(entry)
            is_over = entry.is_refused or (entry.said != "" and not step.catches)
            if is_over or self._aborts.get(number) == at:
                return False
        return True

    def _actions(self, step: Step) -> Iterator[Callable[[], list[Tensor]]]:
        yield partial(nothing, self.engine.reset)
        for op in step.ops:
            yield partial(OPS[type(op)], self, op)
        picks = {"fifo": -1, "lifo": 0}
        while step.rest in picks and self.slots:
            yield partial(do_rest, self, picks[step.rest])
        if step.rest == "drop":
            self.slots.clear()

    def _end(self, step: Step) -> None:
        grads = [w.grad for weights in self.weights for w in weights if w.grad is not None]
        self.results[-1].append(Entry(AT_END, "gradients", [g.clone() for g in grads]))
        del grads
        for weight in (w for weights in self.weights for w in weights):
            weight.grad = None
            if step.updates:
                with torch.no_grad():
                    weight.mul_(0.75)
        self.engine.check_left(is_empty=not self.slots)


def attempt(at: int, action: Callable[[], list[Tensor]]) -> Entry:
    """Do an operation; what it gave, or what it raised."""
    try:
        return Entry(at, "", action())
    except RaceError:
        raise
    except Exception as error:
        if is_refusal(error):
            return Entry(at, "refused", is_refused=True)
        return Entry(at, f"{type(error).__name__}: {_without_operator(str(error))[:80]}")


def _without_operator(said: str) -> str:
    """Under the mode of a simulated device ``reshape`` makes its view by another operator."""
    return re.sub(r"^(Output \d+) of \w+ ", r"\1 ", said)


def is_refusal(error: BaseException | None) -> bool:
    """Whether a saved tensor was found changed in place."""
    while error is not None:
        said = "modified by an inplace", "of its base has been modified inplace"
        if isinstance(error, SavedTensorModifiedError) or any(s in str(error) for s in said):
            return True
        error = error.__cause__
    return False


def nothing(action: Callable[[], None]) -> list[Tensor]:
    action()
    return []


# The operations of a step; each gives tensors to compare


def do_forward(machine: Machine, op: Forward) -> list[Tensor]:
    stage = op.stage % len(machine.program.stages)
    x, before = take_input(machine, stage, op.rows)
    x.requires_grad_(op.needs_grad)
    with machine.engine.on_stream(op.stream):
        machine.engine.begin(stage, op.min_numel)  # here: a stream of no group would be unknown
        with machine.engine.forward():
            y, frame = run_body(machine, stage, x, op)
    if before is not None:
        before.next_x = x
    held = frame.tensors if op.is_held else []
    machine.slots.append(Slot(stage, x, y, held, frame.released, chunk=machine.engine.chunk()))
    return [y.detach().clone()]


def take_input(machine: Machine, stage: int, rows: int) -> tuple[Tensor, Slot | None]:
    """The output of the oldest microbatch that waits for the stage, or a new input."""
    for slot in machine.slots:
        if slot.stage == stage - 1 and slot.next_x is None:
            return slot.y.detach(), slot
    machine._num_inputs += 1
    generator = torch.Generator().manual_seed(1000 * machine.program.seed + machine._num_inputs)
    return torch.randn(rows, WIDTH, generator=generator).to(machine.engine.device), None


def run_body(
    machine: Machine, stage: int, x: Tensor, op: Forward | Evaluate
) -> tuple[Tensor, Frame]:
    """A stage's output, and all that its forward made."""
    bodies = machine.program.stages[stage]
    body = bodies[op.variant % len(bodies)]
    frame = Frame([x], machine.weights[stage])
    try:
        run_parts(body, frame, machine.engine, op)
    finally:
        frame.close()
    y = frame.tensors[-1]
    if y.shape != x.shape or y.dtype != x.dtype or y is x:
        y = torch.zeros_like(x) + (y.sum() / max(1, y.numel())).to(x.dtype)
    return y, frame


def run_parts(body: Body, frame: Frame, engine: Plain, op: Forward | Evaluate) -> None:
    fails_at = fails_backward_at = None
    if isinstance(op, Forward):
        fails_at, fails_backward_at = op.fails_at, op.backward_fails_at
    for at, part in enumerate(body):
        if fails_at is not None and at == fails_at % len(body):
            raise Boom
        if fails_backward_at is not None and at == fails_backward_at % len(body):
            frame.tensors.append(FailsInBackward.apply(frame.pick(0)))
        PARTS[type(part)](part, frame, engine)


def do_backward(machine: Machine, op: Backward) -> list[Tensor]:
    if not machine.slots:
        return []
    slot = machine.slots[-1 - op.pick % len(machine.slots)]
    with machine.engine.on_stream(op.stream):
        return run_backward(machine, slot, op.how)


def do_rest(machine: Machine, pick: int) -> list[Tensor]:
    """The backward of the first or the last microbatch there is."""
    index = 0 if pick else -1
    return run_backward(machine, machine.slots[index], "stage weight")


def run_backward(machine: Machine, slot: Slot, how: str) -> list[Tensor]:
    """After an error the microbatch is gone."""
    is_done = True
    try:
        if slot.parts is not None:
            how = "stage weight"
        if how == "stage weight" or can_backward(slot):
            is_done = not can_backward(slot) and slot.parts is None or HOWS[how](machine, slot)
    finally:
        if is_done and slot in machine.slots:
            machine.slots.remove(slot)
    if slot.x.grad is None:
        return []
    # It may be the very memory that was saved; the next backward would add to that in place, as a
    # user may, and the simulated device would report the user's race.
    slot.x.grad = slot.x.grad.clone()
    return [slot.x.grad.clone()]


def do_evaluate(machine: Machine, op: Evaluate) -> list[Tensor]:
    stage = op.stage % len(machine.program.stages)
    machine._num_inputs += 1
    generator = torch.Generator().manual_seed(machine._num_inputs)
    x = torch.randn(op.rows, WIDTH, generator=generator).to(machine.engine.device)
    machine.engine.begin(stage, 1)
    with torch.no_grad(), machine.engine.forward():
        return [run_body(machine, stage, x, op)[0].clone()]


def do_touch(machine: Machine, op: Touch) -> list[Tensor]:
    if not machine.slots:
        return []
    slot = machine.slots[-1 - op.pick % len(machine.slots)]
    tensors = slot.held or [slot.y]
    with torch.no_grad():
        machine.engine.change(tensors[-1 - op.a % len(tensors)], CHANGES[op.kind])
    return []


def do_peek(machine: Machine, op: Peek) -> list[Tensor]:
    if not machine.slots:
        return []
    slot = machine.slots[-1 - op.pick % len(machine.slots)]
    found: list[Tensor] = []
    nodes: list[Node | None] = [slot.y.grad_fn]
    for _ in range(NUM_PEEKED):
        node = nodes.pop(0) if nodes else None
        if node is None:
            continue
        names = [n for n in dir(node) if n.startswith("_saved_")]
        saved = [getattr(node, name) for name in sorted(names)]
        # A number in an expression is saved as well, and a dispatch mode sees no tensor in it.
        found += [t.detach().clone() for t in saved if isinstance(t, Tensor) and t.dim()]
        nodes += [following for following, _ in node.next_functions]
    return found


def do_drop(machine: Machine, op: Drop) -> list[Tensor]:
    if machine.slots:
        machine.slots.pop(-1 - op.pick % len(machine.slots))
    return []


def do_flush(machine: Machine, op: Flush) -> list[Tensor]:
    return nothing(machine.engine.flush)


def do_switch(machine: Machine, op: Switch) -> list[Tensor]:
    return nothing(partial(machine.engine.switch, op.is_on))


def do_synchronize(machine: Machine, op: Synchronize) -> list[Tensor]:
    return nothing(machine.engine.synchronize)


OPS: dict[type[Record], Callable[[Machine, Any], list[Tensor]]] = {
    Forward: do_forward,
    Backward: do_backward,
    Evaluate: do_evaluate,
    Touch: do_touch,
    Peek: do_peek,
    Drop: do_drop,
    Flush: do_flush,
    Switch: do_switch,
    Synchronize: do_synchronize,
}


# The oracle


@dataclass(frozen=True)
class Report:
    """A program that passed."""

    num_ops: int
    """Operations of its steps."""

    statistics: OffloadStatistics
    """The engine's, at the end."""

    is_refused: bool
    """Whether a tensor was found changed in place."""


def check(program: Program) -> Report:
    """Compare the runs.

    Raises:
        AssertionError: They differ, or something is left of the run with offload.
        RaceError: The simulated device saw one.
    """
    with offload(program) as engine:
        machine = Machine(program, engine)
        got = machine.run()
        statistics = engine.finish()
    with Plain(program) as plain:
        expected = Machine(program, plain).run()
    is_refused = any(entry.is_refused for entries in got + expected for entry in entries)
    if is_refused:
        check_with_witness(program, got)
    else:
        for number, pair in enumerate(zip(got, expected, strict=True)):
            assert_same(number, *pair)
    return Report(machine.num_ops, statistics, is_refused)


def check_with_witness(program: Program, got: Sequence[list[Entry]]) -> None:
    """See NOTE [ Changed in place ]."""
    refused = {
        number: entry.at
        for number, entries in enumerate(got)
        for entry in entries
        if entry.is_refused
    }
    with Witness(program) as witness:
        expected = Machine(program, witness, refused).run()
    for number, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        at = refused.get(number)
        if at is None:
            assert_same(number, ours, theirs)
            continue
        is_known = (number, at) in witness.dirty or any(e.is_refused for e in theirs if e.at == at)
        assert is_known, f"step {number}, operation {at} was refused, but nothing was changed"
        assert_same(number, *([e for e in es if e.at < at] for es in (ours, theirs)))


def assert_same(number: int, got: Sequence[Entry], expected: Sequence[Entry]) -> None:
    for ours, theirs in zip(got, expected, strict=False):
        difference = ours.differs(theirs)
        assert not difference, f"step {number}: {difference}"
    assert len(got) == len(expected), f"step {number}: {len(got)} entries, not {len(expected)}"
