"""Programs as data: what the fuzzer runs, shrinks and prints.

A program is a tree of frozen records of plain values; its ``repr`` is the Python that makes it.
A number that picks something is taken modulo what there is, 0 being the latest, so a program means
something whatever part of it was taken away.

    print(script(program))  # a file that runs the program
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal


class Record:
    """The base of all records. Its ``repr`` leaves out values that are the default."""

    def __repr__(self) -> str:
        values = ((f.name, getattr(self, f.name), f.default) for f in fields(self))  # type: ignore[arg-type]
        given = [f"{name}={value!r}" for name, value, default in values if value != default]
        return f"{type(self).__name__}({', '.join(given)})"


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
class Region(Record):
    """Run parts under a checkpoint, which runs them again in backward; add the last tensor.

    The parts work on a list of their own, which begins with the tensors of the forward, and change
    no tensor in place: PyTorch would compute another result when it runs them again.
    """

    body: Body = ()
    by: str = "torch"
    """Whose checkpoint: PyTorch's, PyTorch's reentrant one, or ours."""


Part = Compute | Change | Enter | Exit | Commit | Free | Region
Body = tuple[Part, ...]

# What a step does.


@dataclass(frozen=True, repr=False)
class Forward(Record):
    """One microbatch through one stage; its input is what the stage before has ready, if any."""

    stage: int = 0
    variant: int = 0
    rows: int = 2
    needs_grad: bool = True
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
    """Change in place a tensor of a microbatch that waits for its backward."""

    kind: str
    pick: int = 0
    a: int = 0


@dataclass(frozen=True, repr=False)
class Drop(Record):
    """Forget a microbatch without a backward."""

    pick: int = 0


@dataclass(frozen=True, repr=False)
class Call(Record):
    """Flush delayed commits, enable or disable offload, or finish all copies."""

    what: Literal["flush", "enable", "disable", "synchronize"] = "flush"


Op = Forward | Backward | Evaluate | Touch | Drop | Call


@dataclass(frozen=True, repr=False)
class Step(Record):
    """From one reset to the next."""

    ops: tuple[Op, ...] = ()
    rest: str = "fifo"
    """The backward of microbatches that are not over: ``fifo``, ``lifo``, ``drop``, or ``keep``
    for the next step.
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
    tiers: tuple[str, ...] = ("host",)
    verify: bool = False
    stash: int | None = None
    """With a number, ``OffloadActivations`` with that ``max_fwd_stash_size``, and no groups."""
    is_fine: bool = False
    """Whether thresholds in bytes are as small as the tensors here."""
    device_limit_bytes: int | None = None
    """With a limit, the fraction is left out."""


@dataclass(frozen=True, repr=False)
class Program(Record):
    """What is run with and without offload."""

    stages: tuple[tuple[Body, ...], ...]
    """For each virtual stage, the bodies a forward may choose from."""
    steps: tuple[Step, ...]
    backend: str = "late"
    seed: int = 0
    options: Options = Options()


def script(program: Program) -> str:
    """A file that runs the program."""
    return (
        '"""Run it in the checkout with PYTHONPATH=.:tests"""\n\n'
        "from helpers.fuzz.programs import *\n"
        "from helpers.fuzz.run import check\n\n"
        f"program = {program!r}\n"
        "check(program)\n"
    )
