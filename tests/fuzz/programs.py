"""Programs as data: what the fuzzer runs, shrinks and prints.

A program is a tree of frozen records of plain values, and its ``repr`` is the Python that makes it.
A number that picks something is taken modulo what there is, 0 being the latest, so that every
program means something, also after a part of it was taken away.

    print(script(program))  # a file that runs it
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

WIDTH = 100


class Record:
    """Its ``repr`` leaves out what is as by default."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{n}={v!r}' for n, v in said(self))})"


# What a stage's forward does. It works on a list of tensors, the first of which is its input.


@dataclass(frozen=True, repr=False)
class Compute(Record):
    """Add a tensor made of two others."""

    kind: str
    a: int = 0
    b: int = 0


@dataclass(frozen=True, repr=False)
class Change(Record):
    """Change a tensor in place."""

    kind: str
    a: int = 0


@dataclass(frozen=True, repr=False)
class Enter(Record):
    """Start a group; what is saved from here on joins it."""

    name: str = "a"
    is_function: bool = False
    """By the function, with the manager as the scope; else by the interface."""


@dataclass(frozen=True, repr=False)
class Exit(Record):
    """Leave the innermost scope."""


@dataclass(frozen=True, repr=False)
class Commit(Record):
    """Commit an open group."""

    name: str = "a"
    is_delayed: bool = False
    release: int | None = None
    """A tensor that is force-released, and not used by the forward any more."""


@dataclass(frozen=True, repr=False)
class Free(Record):
    """Forget a tensor."""

    a: int = 0


@dataclass(frozen=True, repr=False)
class Mark(Record):
    """Keep a tensor on the device."""

    a: int = 0


@dataclass(frozen=True, repr=False)
class Region(Record):
    """Run parts under a checkpoint, which runs them again in backward; adds what they made last.

    The parts work on a list of their own, which begins with the tensors that there are. They do
    not change any in place, for then PyTorch would compute something else when it runs them again.
    """

    body: Body = ()
    by: str = "torch"
    """Whose checkpoint: PyTorch's, its older one, ours, or ours with a stash for inputs."""
    stops: bool = True
    """Whether it stops as soon as backward has what it needs; the older one cannot."""


Part = Compute | Change | Enter | Exit | Commit | Free | Mark | Region
Body = tuple[Part, ...]

# What a step does.


@dataclass(frozen=True, repr=False)
class Forward(Record):
    """One microbatch through one stage; its input is what the stage before has ready, if it has."""

    stage: int = 0
    variant: int = 0
    rows: int = 2
    needs_grad: bool = True
    min_numel: int = 1
    stream: int = 0
    is_held: bool = False
    """Whether its tensors stay referenced."""
    fails_at: int | None = None
    """Raise before this part of the body."""
    backward_fails_at: int | None = None
    """Raise when backward comes to this part of the body."""


@dataclass(frozen=True, repr=False)
class Backward(Record):
    """The backward of a microbatch, or a part of it."""

    how: str = "whole"
    pick: int = 0
    stream: int = 0


@dataclass(frozen=True, repr=False)
class Evaluate(Record):
    """A forward without grad."""

    stage: int = 0
    variant: int = 0
    rows: int = 2


@dataclass(frozen=True, repr=False)
class Touch(Record):
    """Change in place a tensor that a forward left behind."""

    kind: str
    pick: int = 0
    a: int = 0


@dataclass(frozen=True, repr=False)
class Peek(Record):
    """Read what the nodes of a graph saved, outside of backward."""

    pick: int = 0


@dataclass(frozen=True, repr=False)
class Drop(Record):
    """Forget a microbatch without a backward."""

    pick: int = 0


@dataclass(frozen=True, repr=False)
class Flush(Record):
    """Do the delayed commits."""


@dataclass(frozen=True, repr=False)
class Switch(Record):
    """Enable or disable offload."""

    is_on: bool = True


@dataclass(frozen=True, repr=False)
class Synchronize(Record):
    """Finish all copies."""


Op = Forward | Backward | Evaluate | Touch | Peek | Drop | Flush | Switch | Synchronize


@dataclass(frozen=True, repr=False)
class Step(Record):
    """From one reset to the next."""

    ops: tuple[Op, ...] = ()
    rest: str = "fifo"
    """What becomes of microbatches whose backward is not over: ``fifo``, ``lifo``, ``drop``, or
    ``keep`` for the next step.
    """
    catches: bool = False
    """Whether an error ends its operation only; else it ends the step."""
    updates: bool = False
    """Whether the weights change at the end."""


@dataclass(frozen=True, repr=False)
class Options(Record):
    """Options of the engine, named as there."""

    prefetch_bytes: int | Literal["auto"] = "auto"
    max_in_flight_bytes: int = 2**29
    host_budget_bytes: int | None = None
    activation_offload_fraction: float = 1.0
    delta_offload_bytes_across_pp_ranks: int = 0
    pipeline_rank: int = 0
    tiers: tuple[str, ...] = ("host",)
    verify: bool = False
    split_backward: str | None = None
    """As there; None if the engine is not told that backward may come in parts."""
    stash: int | None = None
    """Tensors that gather before they leave, where everything does and groups mean nothing."""
    is_fine: bool = False
    """Whether thresholds in bytes are as small as the tensors here."""
    device_limit_bytes: int | None = None
    """With one, options that say what stays are left out."""


@dataclass(frozen=True, repr=False)
class Program(Record):
    """What is run with and without offload."""

    stages: tuple[tuple[Body, ...], ...]
    """For each virtual stage, the bodies a forward may choose from."""
    steps: tuple[Step, ...]
    backend: str = "late"
    seed: int = 0
    options: Options = Options()


def said(record: Record) -> Iterator[tuple[str, object]]:
    """Fields and values that are not the default."""
    for field in fields(record):  # type: ignore[arg-type]
        value = getattr(record, field.name)
        if value != field.default:
            yield field.name, value


def size(value: object) -> int:
    """How many records a program is made of."""
    if isinstance(value, tuple):
        return sum(size(one) for one in value)
    if not isinstance(value, Record):
        return 0
    return 1 + sum(size(one) for _, one in said(value))


def code(value: object, indent: int = 0) -> str:
    """Python that makes ``value``, in lines that are not too long."""
    flat = repr(value)
    if len(flat) + indent <= WIDTH or not isinstance(value, tuple | Record):
        return flat
    inner = " " * (indent + 4)
    if isinstance(value, tuple):
        lines = [code(one, indent + 4) for one in value]
        begin, end = "(", ")"
    else:
        lines = [f"{n}={code(v, indent + 4)}" for n, v in said(value)]
        begin, end = f"{type(value).__name__}(", ")"
    return begin + "".join(f"\n{inner}{line}," for line in lines) + "\n" + " " * indent + end


def names(value: object) -> set[str]:
    """The records a program is made of."""
    if isinstance(value, tuple):
        return set().union(*map(names, value))
    if not isinstance(value, Record):
        return set()
    return {type(value).__name__}.union(*(names(one) for _, one in said(value)))


def script(program: Program) -> str:
    """A file that runs the program."""
    return (
        '"""Run it in the checkout with PYTHONPATH=.:tests:tests/fuzz"""\n\n'
        f"from programs import {', '.join(sorted(names(program)))}\n"
        "from run import check\n\n"
        f"program = {code(program)}\n"
        "check(program)\n"
    )
