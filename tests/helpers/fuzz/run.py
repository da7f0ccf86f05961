"""Runs a program with and without offload and compares what it computed, bit for bit.

check(program)  # raises AssertionError, with what differs
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint as torchs

from helpers.fuzz.engines import Plain, offload
from helpers.fuzz.kinds import CHANGES, COMPUTES, SHAPES, WIDTH
from helpers.fuzz.programs import (
    Backward,
    Call,
    Change,
    Commit,
    Compute,
    Drop,
    Enter,
    Evaluate,
    Exit,
    Forward,
    Free,
    Part,
    Program,
    Region,
    Step,
    Touch,
)
from helpers.sessions import as_bytes
from pp_offload import OffloadStatistics, RaceError, SavedTensorModifiedError, checkpoint

AT_END = 10**6
"""Behind all operations of a step."""

CHECKPOINTS: dict[str, Callable[..., Tensor]] = {
    "torch": partial(torchs, use_reentrant=False),
    "reentrant": partial(torchs, use_reentrant=True),
    "ours": checkpoint,
}


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
    parts: list[dict[str, Any]] | None = None
    """What the weight gradients are made of, when the gradient of the input is done."""

    def can_backward(self) -> bool:
        return self.y.requires_grad and self.parts is None

    def gradient(self) -> Tensor:
        """The gradient of the output: what the next stage's backward gave, or other numbers."""
        if self.next_x is not None and self.next_x.grad is not None:
            return self.next_x.grad
        y = self.y
        return torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)


@dataclass
class Entry:
    """What one operation gave."""

    at: int
    said: str
    """The error it raised, or an empty text."""
    tensors: list[Tensor] = field(default_factory=list)
    is_refused: bool = False
    """Whether it was refused because a saved tensor was changed in place."""

    def differs(self, other: Entry) -> str:
        """The difference; empty if there is none."""
        if (self.at, self.said) != (other.at, other.said):
            return f"operation {self.at} said {self.said!r}, expected {other.said!r}"
        if len(self.tensors) != len(other.tensors):
            return f"operation {self.at} ({self.said}) gave another number of tensors"
        for number, (got, expected) in enumerate(zip(self.tensors, other.tensors, strict=True)):
            if not same_bits(got, expected):
                where = f"operation {self.at} ({self.said}), tensor {number}"
                return f"{where} is\n{got}\nexpected\n{expected}"
        return ""


def same_bits(a: Tensor, b: Tensor) -> bool:
    same_kind = a.dtype == b.dtype and a.shape == b.shape
    return same_kind and torch.equal(as_bytes(a), as_bytes(b))


# The parts of a body


@dataclass
class Frame:
    """A forward that runs: its tensors, and the groups that are open."""

    tensors: list[Tensor]
    weights: list[Tensor]
    engine: Plain
    lent: Sequence[Tensor] = ()
    """Those that others need, and need whole."""
    groups: list[str] = field(default_factory=list)
    scopes: list[AbstractContextManager[object]] = field(default_factory=list)
    released: list[Tensor] = field(default_factory=list)

    def pick(self, number: int) -> Tensor:
        return self.tensors[-1 - number % len(self.tensors)]

    def do(self, part: Part) -> None:
        match part:
            case Compute():
                a, b = self.pick(part.a), self.pick(part.b)
                self.tensors.append(COMPUTES[part.kind](a, b, self.weights))
            case Change():
                self.engine.change(self.pick(part.a), CHANGES[part.kind])
            case Enter():
                scope = self.engine.scope(part.name, self.pick(0))
                scope.__enter__()
                self.scopes.append(scope)
                self.groups.append(part.name)
            case Exit() if self.scopes:
                self.scopes.pop().__exit__(None, None, None)
            case Commit() if part.name in self.groups:
                self._commit(part)
            case Free() if len(self.tensors) > 1:
                self.tensors.pop(-1 - part.a % len(self.tensors))
            case Region():
                self._region(part)

    def close(self) -> None:
        while self.scopes:
            self.scopes.pop().__exit__(None, None, None)

    def _commit(self, part: Commit) -> None:
        self.groups.remove(part.name)
        released = []
        if part.release is not None and not is_in(self.pick(part.release), self.lent):
            released.append(self.pick(part.release))
        rest = [tensor for tensor in self.tensors if not is_in(tensor, released)]
        if rest:
            self.tensors = rest
            self.released += released
        self.engine.commit(part.name, part.is_delayed, released if rest else [])

    def _region(self, part: Region) -> None:
        again = Again(part, len(self.tensors), self.engine)
        # Weights are handed over, too: if one is changed, autograd is to notice.
        y = CHECKPOINTS[part.by](again, *self.tensors, *self.weights)
        inner, again.first = again.first, None
        assert inner is not None
        if part.by != "reentrant":  # it runs without grad first, where groups are not opened
            self.groups += inner.groups
        self.released += inner.released
        if not is_in(y, self.tensors):
            self.tensors.append(y)


def is_in(tensor: Tensor, tensors: Sequence[Tensor]) -> bool:
    return any(tensor is other for other in tensors)


class Again:
    """A region's parts as a function, which may be called any number of times.

    Attributes:
        first: The frame of the first call, until somebody takes it away.
    """

    def __init__(self, part: Region, num_tensors: int, engine: Plain) -> None:
        self.first: Frame | None = None
        self._part, self._num_tensors, self._engine = part, num_tensors, engine
        self._is_first = True

    def __call__(self, *given: Tensor) -> Tensor:
        tensors, weights = given[: self._num_tensors], given[self._num_tensors :]
        frame = Frame(list(tensors), list(weights), self._engine, tensors)
        is_first, self._is_first = self._is_first, False
        try:
            for part in self._part.body:
                frame.do(part)
        finally:
            frame.close()
        if is_first:
            # Not before: after an error the frame would stay in a cycle with the graph.
            self.first = frame
        return frame.tensors[-1]


# Kinds of backward: each says whether the microbatch is done


def whole(machine: Machine, slot: Slot) -> bool:
    slot.y.backward(slot.gradient())
    return True


def retain(machine: Machine, slot: Slot) -> bool:
    slot.y.backward(slot.gradient(), retain_graph=True)
    return False


def of_weights(machine: Machine, slot: Slot) -> bool:
    weights = machine.weights[slot.stage]
    gradients = torch.autograd.grad(slot.y, weights, slot.gradient(), allow_unused=True)
    for weight, gradient in zip(weights, gradients, strict=True):
        if gradient is not None:
            weight.grad = gradient if weight.grad is None else weight.grad + gradient
    return True


def stage_input(machine: Machine, slot: Slot) -> bool:
    """The gradient of the input, as the schedules with a split backward do."""
    if slot.x.requires_grad:
        weights = iter(machine.weights[slot.stage])
        _, slot.parts = stage_backward_input([slot.y], [slot.gradient()], [slot.x], weights)
    return False


def stage_weight(machine: Machine, slot: Slot) -> bool:
    parts, slot.parts = slot.parts, None
    if parts is None:
        return whole(machine, slot)
    stage_backward_weight(iter(machine.weights[slot.stage]), parts)
    return True


def double(machine: Machine, slot: Slot) -> bool:
    """Gradients of the gradient of the input."""
    if not slot.x.requires_grad:
        return whole(machine, slot)
    (first,) = torch.autograd.grad(
        slot.y, slot.x, slot.gradient(), create_graph=True, allow_unused=True
    )
    if first is not None and first.requires_grad:
        first.square().sum().backward()
    return True


def together(machine: Machine, slot: Slot) -> bool:
    """With all the others of the stage that can."""
    slots = [s for s in machine.slots if s.stage == slot.stage and s.can_backward()]
    torch.autograd.backward([s.y for s in slots], [s.gradient() for s in slots])
    machine.slots = [s for s in machine.slots if s not in slots]
    return True


HOWS: dict[str, Callable[[Machine, Slot], bool]] = {
    "whole": whole,
    "retain": retain,
    "weight": of_weights,
    "stage input": stage_input,
    "stage weight": stage_weight,
    "double": double,
    "together": together,
}


class Machine:
    """Runs a program on an engine."""

    def __init__(self, program: Program, engine: Plain) -> None:
        self.program = program
        self.engine = engine
        self.slots: list[Slot] = []
        self.results: list[list[Entry]] = []
        self.num_ops = 0
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
        for step in self.program.steps:
            self.results.append([])
            if not self._run_step(step):
                self.slots.clear()
            self._end(step)
        self.slots.clear()
        return self.results

    def _run_step(self, step: Step) -> bool:
        """Whether it came to its end."""
        for at, action in enumerate(self._actions(step), -1):
            self.num_ops += 1
            entry = attempt(at, action)
            self.results[-1].append(entry)
            if entry.is_refused or (entry.said and not step.catches):
                return False
        return True

    def _actions(self, step: Step) -> Iterator[Callable[[], list[Tensor] | None]]:
        yield self.engine.reset
        for op in step.ops:
            yield partial(OPS[type(op)], self, op)
        while step.rest in ("fifo", "lifo") and self.slots:
            index = 0 if step.rest == "fifo" else -1
            yield partial(run_backward, self, self.slots[index], "stage weight")
        if step.rest == "drop":
            self.slots.clear()

    def _end(self, step: Step) -> None:
        weights = [weight for stage in self.weights for weight in stage]
        gradients = [w.grad.clone() for w in weights if w.grad is not None]
        self.results[-1].append(Entry(AT_END, "gradients", gradients))
        for weight in weights:
            weight.grad = None
            if step.updates:
                with torch.no_grad():
                    weight.mul_(0.75)
        self.engine.check_left(is_empty=not self.slots)

    def slot(self, pick: int) -> Slot | None:
        return self.slots[-1 - pick % len(self.slots)] if self.slots else None

    def take_input(self, stage: int, rows: int) -> tuple[Tensor, Slot | None]:
        """The output of the oldest microbatch that waits for the stage, or a new input."""
        for slot in self.slots:
            if slot.stage == stage - 1 and slot.next_x is None:
                return slot.y.detach(), slot
        self._num_inputs += 1
        generator = torch.Generator().manual_seed(1000 * self.program.seed + self._num_inputs)
        return torch.randn(rows, WIDTH, generator=generator).to(self.engine.device), None


def attempt(at: int, action: Callable[[], list[Tensor] | None]) -> Entry:
    """Do an operation; what it gave, or what it raised."""
    try:
        return Entry(at, "", action() or [])
    except RaceError:
        raise
    except Exception as error:
        if is_refusal(error):
            return Entry(at, "refused", is_refused=True)
        # Under the mode of a simulated device ``reshape`` makes its view by another operator.
        text = re.sub(r"^(Output \d+) of \w+ ", r"\1 ", str(error))
        return Entry(at, f"{type(error).__name__}: {text[:80]}")


def is_refusal(error: BaseException | None) -> bool:
    """Whether the error says that a saved tensor was changed in place."""
    while error is not None:
        if isinstance(error, SavedTensorModifiedError) or "modified" in str(error):
            return True
        error = error.__cause__
    return False


# The operations of a step; each gives tensors to compare


def do_forward(machine: Machine, op: Forward) -> list[Tensor]:
    stage = op.stage % len(machine.program.stages)
    x, before = machine.take_input(stage, op.rows)
    x.requires_grad_(op.needs_grad)
    with machine.engine.on_stream(op.stream):
        machine.engine.begin(stage)  # here: a stream of no group would be unknown
        with machine.engine.forward():
            y, frame = run_body(machine, stage, x, op)
    if before is not None:
        before.next_x = x
    held = frame.tensors if op.is_held else []
    machine.slots.append(Slot(stage, x, y, held, frame.released))
    return [y.detach().clone()]


def do_evaluate(machine: Machine, op: Evaluate) -> list[Tensor]:
    stage = op.stage % len(machine.program.stages)
    x = machine.take_input(0, op.rows)[0]
    machine.engine.begin(stage)
    with torch.no_grad(), machine.engine.forward():
        return [run_body(machine, stage, x, op)[0].clone()]


def run_body(
    machine: Machine, stage: int, x: Tensor, op: Forward | Evaluate
) -> tuple[Tensor, Frame]:
    """A stage's output, and all that its forward made."""
    bodies = machine.program.stages[stage]
    body = bodies[op.variant % len(bodies)]
    fails_at = [
        None if number is None else number % len(body)
        for number in (getattr(op, "fails_at", None), getattr(op, "backward_fails_at", None))
    ]
    frame = Frame([x], machine.weights[stage], machine.engine)
    try:
        for at, part in enumerate(body):
            if at == fails_at[0]:
                raise Boom
            if at == fails_at[1]:
                frame.tensors.append(FailsInBackward.apply(frame.pick(0)))
            frame.do(part)
    finally:
        frame.close()
    y = frame.tensors[-1]
    if y.shape != x.shape or y.dtype != x.dtype or y is x:
        y = torch.zeros_like(x) + (y.sum() / max(1, y.numel())).to(x.dtype)
    return y, frame


def do_backward(machine: Machine, op: Backward) -> list[Tensor]:
    slot = machine.slot(op.pick)
    if slot is None:
        return []
    with machine.engine.on_stream(op.stream):
        return run_backward(machine, slot, op.how)


def run_backward(machine: Machine, slot: Slot, how: str) -> list[Tensor]:
    """After an error the microbatch is gone."""
    is_done = True
    try:
        if slot.parts is not None:
            how = "stage weight"
        if slot.parts is not None or slot.can_backward():
            is_done = HOWS[how](machine, slot)
    finally:
        if is_done and slot in machine.slots:
            machine.slots.remove(slot)
    if slot.x.grad is None:
        return []
    # It may be the very memory that was saved; the next backward would add to that in place, as a
    # user may, and the simulated device would report the user's race.
    slot.x.grad = slot.x.grad.clone()
    return [slot.x.grad.clone()]


def do_touch(machine: Machine, op: Touch) -> None:
    slot = machine.slot(op.pick)
    if slot is not None:
        tensors = slot.held or [slot.y]
        with torch.no_grad():
            machine.engine.change(tensors[-1 - op.a % len(tensors)], CHANGES[op.kind])


def do_drop(machine: Machine, op: Drop) -> None:
    slot = machine.slot(op.pick)
    if slot is not None:
        machine.slots.remove(slot)


def do_call(machine: Machine, op: Call) -> None:
    machine.engine.call(op.what)


OPS: dict[type, Callable[[Machine, Any], list[Tensor] | None]] = {
    Forward: do_forward,
    Backward: do_backward,
    Evaluate: do_evaluate,
    Touch: do_touch,
    Drop: do_drop,
    Call: do_call,
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
    """Compare the runs, up to where one of them is refused: a saved tensor was changed in place.

    Autograd refuses when backward asks for the tensor. The engine may refuse as early as at the
    commit, or use the value at save.

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
    is_refused = False
    for number, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        for entry, right in zip(ours, theirs, strict=False):
            is_refused = is_refused or entry.is_refused or right.is_refused
            difference = "" if is_refused else entry.differs(right)
            assert not difference, f"step {number}: {difference}"
        assert is_refused or len(ours) == len(theirs), f"step {number} ended early"
    can_change = any(name in repr(program) for name in ("Change(", "Touch("))
    can_change |= any(entry.is_refused for theirs in expected for entry in theirs)  # by an update
    assert can_change or not is_refused, "it was refused, but nothing was changed"
    return Report(machine.num_ops, statistics, is_refused)
