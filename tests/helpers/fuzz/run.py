"""Runs a program with and without offload and compares what it computed, bit for bit.

check(program)  # raises AssertionError, with what differs
counts, failure = explore(seed=1, programs=500)
failure.script()  # runs the smallest program that fails as it does
"""

from __future__ import annotations

import logging
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint as torchs

from helpers.fuzz.operators import CHANGES, COMPUTES, SHAPES, WIDTH
from helpers.fuzz.programs import (
    Backward,
    Body,
    Call,
    Do,
    Forward,
    Group,
    Part,
    Program,
    Region,
    Step,
    drawn,
    script,
    simpler,
)
from helpers.saving import Raises
from helpers.sessions import assert_idle, assert_no_hooks, assert_same, in_use, make_backend, unseen
from helpers.threaded import settled
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    GroupStateError,
    OffloadActivations,
    OffloadConfig,
    OffloadStatistics,
    PipelineOffloadManager,
    RaceError,
    SavedTensorModifiedError,
    checkpoint,
    use_backend,
)

CHECKPOINTS: dict[str, Callable[..., Tensor]] = {
    "torch": partial(torchs, use_reentrant=False),
    "reentrant": partial(torchs, use_reentrant=True),
    "ours": checkpoint,
}


class Engine:
    """What a program calls. Its owner is a manager, to which what is saved in groups leaves; or a
    context, to which all leaves that is saved in a forward; or None without offload.
    """

    def __init__(self, device: torch.device, owner: Any = None, backend: Any = None) -> None:
        self.device, self.owner, self.backend = device, owner, backend
        self.has_groups = isinstance(owner, PipelineOffloadManager)
        self._streams: dict[int, Any] = {}

    def reset(self) -> None:
        """A step begins."""
        if self.has_groups:
            try:
                off_interface.reset()
            except GroupStateError as error:  # a program may leave groups open; the step has begun
                if "never committed" not in str(error):
                    raise

    @contextmanager
    def forward(self, num_stages: int, stage: int) -> Iterator[None]:
        """Around each forward."""
        if self.has_groups:
            off_interface.init_chunk_handler(num_stages, stage, 1)
        with nullcontext() if self.has_groups or self.owner is None else self.owner:
            yield

    def scope(self, name: str, x: Tensor) -> AbstractContextManager[object]:
        """Around the body of a group."""
        return off_interface(self.has_groups, x, name)

    def commit(self, name: str, released: Sequence[Tensor], is_delayed: bool) -> None:
        if self.has_groups:
            off_interface.group_commit((), name, released, is_delayed)

    @contextmanager
    def on_stream(self, number: int) -> Iterator[object]:
        """Another compute stream, ordered with the others on entering and leaving."""
        backend = self.backend
        if number == 0 or not hasattr(backend, "new_stream"):
            yield
            return
        if number not in self._streams:
            self._streams[number] = backend.new_stream(f"side {number}")
        main, side = backend.current_stream(), self._streams[number]
        side.wait_stream(main)
        try:
            with backend.stream(side):
                yield
        finally:
            main.wait_stream(side)

    def change(self, tensor: Tensor, how: Callable[[Tensor], object]) -> None:
        # The simulated device would report the race itself; here the engine alone must notice.
        with nullcontext() if self.owner is None else unseen(self.backend):
            how(tensor)

    def synchronize(self) -> None:
        """Wait until all bytes are on the host, or on the disk."""
        if self.owner is not None:
            self.backend.synchronize()
            settled(self.owner)

    def check_left(self, is_empty: bool) -> None:
        """Nothing is in use; ``is_empty`` says that no graph is alive."""
        if self.owner is None or not is_empty:
            assert_no_hooks()
            return
        if any(in_use(self.owner).values()):
            self.synchronize()
        assert_idle(self.owner)

    def finish(self) -> OffloadStatistics:
        """The program is over: nothing is in use."""
        self.reset()
        self.synchronize()
        self.check_left(True)
        return self.owner.statistics()


@contextmanager
def offload(program: Program) -> Iterator[Engine]:
    """The engine that the program is to run on."""
    backend = make_backend(program.backend, program.seed)
    defaults = {"min_offloaded_tensor_size": 1, "device_limit_bytes": None}
    config = OffloadConfig(**defaults | program.options)
    with ExitStack() as stack:
        logger = logging.getLogger("pp_offload")
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)  # no warning of what stays
        for name, value in FINE.items() if program.is_fine else ():
            stack.enter_context(patch(name, value))
        if program.stash is None:
            owner: Any = stack.enter_context(use_backend(backend, config=config))
        else:
            stack.enter_context(backend.activate())
            sizes = {"min_offload_size": 1, "max_fwd_stash_size": program.stash}
            owner = OffloadActivations(config=config, backend=backend, **sizes)
        yield Engine(backend.device, owner, backend)


FINE = {
    "pp_offload._core.window.SMALL_BYTES": 64,
    "pp_offload._core.in_flight.SMALL_BYTES": 64,
    "pp_offload._core.geometry.MAX_PADDING_BYTES": 8,
    "pp_offload._memory.host_pool.HostPool.min_slab_bytes": 1024,
}
"""Tensors of a program are tiny; with these, sizes that decide something are as small."""


# A forward


class Boom(Exception):
    """What a program raises on purpose."""


@dataclass
class Frame:
    """A forward that runs."""

    tensors: list[Tensor]
    weights: list[Tensor]
    engine: Engine
    fails_at: int | None = None
    backward_fails_at: int | None = None
    num_parts: int = 0
    released: list[Tensor] = field(default_factory=list)
    """Force-released tensors; held, and not looked at."""
    open_groups: list[Group] = field(default_factory=list)
    """To be committed at the end."""

    def run(self, body: Body) -> Tensor:
        """All parts and the commits at the end; the last tensor."""
        for part in body:
            self.do(part)
        for group in self.open_groups:
            self._commit(group)
        return self.tensors[-1]

    def pick(self, number: int) -> Tensor:
        return self.tensors[-1 - number % len(self.tensors)]

    def do(self, part: Part) -> None:
        if self.num_parts == self.fails_at:
            raise Boom
        if self.num_parts == self.backward_fails_at:
            self.tensors.append(Raises.apply(self.pick(0), Boom))
        self.num_parts += 1
        match part:
            case Do(kind="free"):
                if len(self.tensors) > 1:
                    self.tensors.pop(-1 - part.a % len(self.tensors))
            case Do() if part.kind in CHANGES:
                self.engine.change(self.pick(part.a), CHANGES[part.kind])
            case Do():
                a, b = self.pick(part.a), self.pick(part.b)
                self.tensors.append(COMPUTES[part.kind](a, b, self.weights))
            case Group():
                with self.engine.scope(part.name, self.pick(0)):
                    for inner in part.body:
                        self.do(inner)
                if part.commit == "at the end":
                    self.open_groups.append(part)
                elif part.commit != "never":
                    self._commit(part)
            case Region():
                self._region(part)

    def _commit(self, group: Group) -> None:
        released: list[Tensor] = []
        if group.release is not None:
            tensor = self.pick(group.release)
            rest = [other for other in self.tensors if other is not tensor]
            if rest:
                self.tensors, released = rest, [tensor]
                self.released.append(tensor)
        self.engine.commit(group.name, released, group.commit == "delayed")

    def _region(self, region: Region) -> None:
        num, engine = len(self.tensors), self.engine

        def run(*given: Tensor) -> Tensor:
            return Frame(list(given[:num]), list(given[num:]), engine).run(region.body)

        # Weights are handed over, too: if one is changed, autograd is to notice.
        y = CHECKPOINTS[region.by](run, *self.tensors, *self.weights)
        if not any(y is tensor for tensor in self.tensors):
            self.tensors.append(y)


@dataclass(eq=False)
class Microbatch:
    """On a stage, from its forward to the end of its backward."""

    stage: int
    x: Tensor
    y: Tensor
    frame: Frame
    """Its forward's, whose tensors are held, or none."""
    weights: list[nn.Parameter]
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

    def backward(self, how: str, waiting: list[Microbatch]) -> list[Microbatch]:
        """A backward of one of ``programs.HOWS``, or ``whole``; which microbatches are done."""
        y, x, gradient = self.y, self.x, self.gradient()
        match how:
            case _ if self.parts is not None:  # the rest of a split one
                parts, self.parts = self.parts, None
                stage_backward_weight(iter(self.weights), parts)
            case _ if not y.requires_grad:
                pass
            case "retain":
                y.backward(gradient, retain_graph=True)
                return []
            case "weight":
                y.backward(gradient, inputs=self.weights)
            case "stage input":  # as the schedules with a split backward do
                if x.requires_grad:
                    _, self.parts = stage_backward_input([y], [gradient], [x], iter(self.weights))
                return []
            case "double" if x.requires_grad:  # gradients of the gradient of the input
                (first,) = torch.autograd.grad(y, x, gradient, create_graph=True, allow_unused=True)
                if first is not None and first.requires_grad:
                    first.square().sum().backward()
            case "together":
                batches = [b for b in waiting if b.stage == self.stage and b.can_backward()]
                torch.autograd.backward([b.y for b in batches], [b.gradient() for b in batches])
                return batches
            case _:
                y.backward(gradient)
        return [self]


# Steps


class Result(NamedTuple):
    """What one operation gave."""

    where: str
    error: str = ""
    """Empty if there was none, ``refused`` if a saved tensor was changed in place."""
    tensors: Sequence[Tensor] = ()


class Machine:
    """Runs a program on an engine."""

    def __init__(self, program: Program, engine: Engine) -> None:
        self.program = program
        self.engine = engine
        self.waiting: list[Microbatch] = []
        self.num_ops = 0
        self._num_inputs = 0
        torch.manual_seed(program.seed)  # for what drops out
        self.weights = [
            [nn.Parameter(self._random(10 * number + n, *s)) for n, s in enumerate(SHAPES)]
            for number in range(len(program.stages))
        ]

    def run(self) -> list[list[Result]]:
        """For every step, what its operations gave, and the gradients at its end."""
        results = [self._step(step) for step in self.program.steps]
        self.waiting.clear()
        return results

    def _step(self, step: Step) -> list[Result]:
        results = self._operations(step)
        weights = [weight for stage in self.weights for weight in stage]
        gradients = [w.grad.clone() for w in weights if w.grad is not None]
        results.append(Result("the end", "", gradients))
        for weight in weights:
            weight.grad = None
            if step.updates:
                with torch.no_grad():
                    weight.mul_(0.75)
        self.engine.check_left(is_empty=not self.waiting)
        return results

    def _operations(self, step: Step) -> list[Result]:
        """Up to an error that ends the step; no microbatch is referenced afterwards."""
        results: list[Result] = []
        for number, action in enumerate(self._actions(step)):
            self.num_ops += 1
            results.append(attempt(f"operation {number}", action))
            if results[-1].error == "refused" or results[-1].error and not step.catches:
                self.waiting.clear()
                break
        return results

    def _actions(self, step: Step) -> Iterator[Callable[[], Sequence[Tensor] | None]]:
        yield self.engine.reset
        for op in step.ops:
            match op:
                case Forward():
                    yield partial(self._forward, op)
                case Backward() if self.waiting:
                    yield partial(self._backward, self._pick(op.pick), op.how, op.stream)
                case Call():
                    yield partial(self._call, op)
        while step.rest in ("fifo", "lifo") and self.waiting:
            batch = self.waiting[0 if step.rest == "fifo" else -1]
            yield partial(self._backward, batch, "stage weight", 0)
        if step.rest == "drop":
            self.waiting.clear()

    def _pick(self, number: int) -> Microbatch:
        return self.waiting[-1 - number % len(self.waiting)]

    def _random(self, seed: int, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.program.seed + seed)
        return torch.randn(*shape, generator=generator).to(self.engine.device)

    def _input(self, stage: int, rows: int) -> tuple[Tensor, Microbatch | None]:
        """The output of the oldest microbatch that waits for the stage, or a new input."""
        for batch in self.waiting:
            if batch.stage == stage - 1 and batch.next_x is None:
                return batch.y.detach(), batch
        self._num_inputs += 1
        return self._random(100 + self._num_inputs, rows, WIDTH), None

    def _output(self, stage: int, x: Tensor, op: Forward) -> tuple[Tensor, Frame]:
        """What a stage computes."""
        bodies = self.program.stages[stage]
        frame = Frame([x], self.weights[stage], self.engine, op.fails_at, op.backward_fails_at)
        with self.engine.forward(len(self.program.stages), stage):
            y = frame.run(bodies[op.variant % len(bodies)])
            if y.shape != x.shape or y.dtype != x.dtype or y is x:
                y = torch.zeros_like(x) + (y.sum() / max(1, y.numel())).to(x.dtype)
        return y, frame

    def _forward(self, op: Forward) -> list[Tensor]:
        stage = op.stage % len(self.program.stages)
        x, before = self._input(stage, op.rows)
        x.requires_grad_(op.needs_grad)
        with self.engine.on_stream(op.stream):
            y, frame = self._output(stage, x, op)
        if before is not None:
            before.next_x = x
        if not op.is_held:
            frame.tensors.clear()
        self.waiting.append(Microbatch(stage, x, y, frame, self.weights[stage]))
        return [y.detach().clone()]

    def _backward(self, batch: Microbatch, how: str, stream: int) -> list[Tensor]:
        """After an error the microbatch is gone."""
        gone = [batch]
        try:
            with self.engine.on_stream(stream):
                gone = batch.backward(how, self.waiting)
        finally:
            self.waiting = [b for b in self.waiting if b not in gone]
        if batch.x.grad is None:
            return []
        # It may be the very memory that was saved; the next backward would add to that in place, as
        # a user may, and the simulated device would report the user's race.
        batch.x.grad = batch.x.grad.clone()
        return [batch.x.grad.clone()]

    def _call(self, call: Call) -> Sequence[Tensor] | None:
        if call.what == "evaluate":
            stage = call.pick % len(self.program.stages)
            with torch.no_grad():
                return [self._output(stage, self._input(0, 3)[0], Forward())[0].clone()]
        if call.what == "synchronize":
            self.engine.synchronize()
        elif call.what not in ("touch", "drop"):
            if self.engine.has_groups:
                getattr(self.engine.owner, call.what)()
        elif self.waiting:
            batch = self._pick(call.pick)
            if call.what == "drop":
                self.waiting.remove(batch)
                return None
            tensors = batch.frame.tensors or [batch.y]
            with torch.no_grad():
                self.engine.change(tensors[-1 - call.pick % len(tensors)], CHANGES[call.change])
        return None


def attempt(where: str, action: Callable[[], Sequence[Tensor] | None]) -> Result:
    """Do an operation; what it gave, or what it raised."""
    try:
        return Result(where, "", action() or ())
    except RaceError:
        raise
    except Exception as error:
        if is_refusal(error):
            return Result(where, "refused")
        # Under the mode of a simulated device ``reshape`` makes its view by another operator.
        text = re.sub(r"^(Output \d+) of \w+ ", r"\1 ", str(error))
        return Result(where, f"{type(error).__name__}: {text[:80]}")


def is_refusal(error: BaseException | None) -> bool:
    """Whether the error says that a saved tensor was changed in place."""
    while error is not None:
        if isinstance(error, SavedTensorModifiedError) or "modified" in str(error):
            return True
        error = error.__cause__
    return False


# The oracle


def check(program: Program) -> dict[str, int]:
    """Compare the runs, up to where one of them is refused: a saved tensor was changed in place.

    Autograd refuses when backward asks for the tensor. The engine may refuse as early as at the
    commit, or use the value at save.

    Returns:
        The operations of a program that passed, and what it did.
    """
    with offload(program) as engine:
        machine = Machine(program, engine)
        got = machine.run()
        statistics = engine.finish()
    is_real = program.backend in ("cuda", "emulated")
    device = torch.device(program.backend if is_real else "cpu")
    expected = Machine(program, Engine(device)).run()
    is_refused = False
    for number, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        for result, right in zip(ours, theirs, strict=False):
            is_refused = is_refused or "refused" in (result.error, right.error)
            if not is_refused:
                where, outcomes = f"step {number}, {right.where}", (result.error, right.error)
                assert result.where == right.where, f"{where} instead of {result.where}"
                assert result.error == right.error, f"{where} raised, and was expected: {outcomes}"
                assert_same(result.tensors, right.tensors, where)
        assert is_refused or len(ours) == len(theirs), f"step {number} ended early"
    can_change = any(f"kind='{name}'" in repr(program) for name in CHANGES)
    can_change |= "touch" in repr(program)
    can_change |= any(right.error == "refused" for theirs in expected for right in theirs)
    assert can_change or not is_refused, "it was refused, but nothing was changed"
    return {
        "operations": machine.num_ops,
        "offloaded": statistics.bytes_offloaded > 0,
        "computed again": statistics.bytes_computed_again > 0,
        "refused by autograd": is_refused,
    }


# Many programs, and the smallest of those that fail


class Failure(NamedTuple):
    """A program that failed, as small as it could be made."""

    program: Program
    error: str

    def script(self) -> str:
        """A file that runs it, with what it says at the top."""
        error = "".join(f"# {line}\n" for line in self.error.splitlines())
        return error + script(self.program)


def explore(
    seed: int, programs: int, backend: str | None = None
) -> tuple[Counter[str], Failure | None]:
    """Run so many programs drawn from a seed, until one fails, which is made small: counts of what
    was run, and that failure. Without a ``backend`` each runs on the one that it was drawn with.
    """
    counts = Counter[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(programs):
            program = drawn(random.Random(f"{seed} {number}"))
            program = program if backend is None else replace(program, backend=backend)
            counts["programs"] += 1
            try:
                counts.update(check(program))
            except Exception as error:
                # At once, for to make it small may take minutes.
                sys.stderr.write(f"{text_of(error)}\n{script(program)}\n")
                return counts, shrunk(Failure(program, text_of(error)), type(error))
    return counts, None


def text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def shrunk(failure: Failure, kind: type[Exception]) -> Failure:
    """The smallest program that raises an error of this kind, of those that lead there."""
    at = num_tried = 0
    while num_tried < len(candidates := list(simpler(failure.program))):
        candidate = candidates[at % len(candidates)]
        try:
            check(candidate)
        except kind as error:
            failure, num_tried = Failure(candidate, text_of(error)), 0
            continue
        except Exception:
            pass  # it means nothing, such as one without a stage
        at, num_tried = at + 1, num_tried + 1
    return failure
