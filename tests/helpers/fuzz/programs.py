"""Programs as data: frozen records of plain values, drawn from a seed.

A number that picks something is taken modulo what there is, 0 being the latest, so a program means
something whatever part of it was taken away.

program = drawn(random.Random(7))
print(script(program))              # a file that runs the program
for smaller in simpler(program): ...
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import Any

from helpers.fuzz.operators import CHANGES, COMPUTES

# The forward of a stage. It works on a list of tensors, the first of which is its input.


@dataclass(frozen=True)
class Do:
    """Append a tensor made of two others; or change one in place; or forget it (``free``)."""

    kind: str
    a: int = 0
    b: int = 0


@dataclass(frozen=True)
class Group:
    """Parts of which saved tensors leave."""

    body: Body
    name: str = "a"
    commit: str = "at once"
    """Or ``delayed``, ``at the end`` of the forward, ``never``."""
    release: int | None = None
    """A tensor that is force-released, and not used by the forward any more."""


@dataclass(frozen=True)
class Region:
    """Parts under a checkpoint, which runs them again in backward; appends their last tensor."""

    body: Body
    by: str = "torch"
    """Whose checkpoint: PyTorch's, PyTorch's ``reentrant`` one, or ``ours``."""


Part = Do | Group | Region
Body = tuple[Part, ...]

# A step


@dataclass(frozen=True)
class Forward:
    """One microbatch through one stage; its input is what the stage before has ready, if any."""

    stage: int = 0
    variant: int = 0
    rows: int = 2
    needs_grad: bool = True
    stream: int = 0
    is_held: bool = False
    """Whether its tensors stay referenced."""
    fails_at: int | None = None
    """Raise before this part."""
    backward_fails_at: int | None = None
    """Raise when backward comes to this part."""


@dataclass(frozen=True)
class Backward:
    """The backward of a microbatch, or a part of it."""

    how: str = "whole"
    pick: int = 0
    stream: int = 0


@dataclass(frozen=True)
class Call:
    """``evaluate`` without grad; ``touch`` a tensor of a waiting microbatch in place, or ``drop``
    the microbatch; ``synchronize``; or a method of the manager.
    """

    what: str = "evaluate"
    pick: int = 0
    change: str = "add_"


@dataclass(frozen=True)
class Step:
    """From one reset to the next."""

    ops: tuple[Forward | Backward | Call, ...] = ()
    rest: str = "fifo"
    """Backward of the microbatches that remain: ``fifo``, ``lifo``, ``drop``, or ``keep`` them."""
    catches: bool = False
    """Whether an error ends its operation only; else it ends the step."""
    updates: bool = False
    """Whether the weights change at the end."""


@dataclass(frozen=True)
class Program:
    """What is run with and without offload."""

    stages: tuple[tuple[Body, ...], ...]
    """For each virtual stage, the bodies a forward may choose from."""
    steps: tuple[Step, ...]
    backend: str = "late"
    seed: int = 0
    stash: int | None = None
    """With a number, ``OffloadActivations`` with that ``max_fwd_stash_size``, and no groups."""
    is_fine: bool = False
    """Whether thresholds in bytes are as small as the tensors here."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the engine, by name."""


def script(program: Program) -> str:
    """A file that runs the program."""
    return (
        '"""Run it in the checkout with PYTHONPATH=.:tests"""\n\n'
        "from helpers.fuzz.programs import *\n"
        "from helpers.fuzz.run import check\n\n"
        f"program = {program!r}\n"
        "check(program)\n"
    )


# Drawing

HOWS = ["weight", "retain", "stage input", "stage weight", "double", "together"]

CALLS = [
    *("evaluate", "touch", "drop", "flush_delayed_groups", "synchronize"),
    *("enable_offload", "disable_offload"),
]


class Draw:
    """Parts, operations and options from a source of random numbers."""

    def __init__(self, source: random.Random, kinds: Sequence[str]) -> None:
        self.one_of = source.choice
        self.number = source.randrange
        self.kinds = kinds
        self.again = [kind for kind in kinds if kind != "reads twice"]  # checkpoints refuse it

    def seldom(self, share: int = 6) -> bool:
        """True once in ``share`` times."""
        return self.number(share) == 0

    def lines(self, most: int, is_in_region: bool) -> Body:
        kinds = self.again if is_in_region else self.kinds
        others = ["free"] if is_in_region else ["free", *CHANGES]  # a region runs again
        return tuple(
            Do(self.one_of(others if self.seldom(9) else kinds), self.number(4), self.number(4))
            for _ in range(1 + self.number(most))
        )

    def group(self, is_in_region: bool, depth: int = 0) -> Group:
        body = self.lines(4, is_in_region)
        if depth == 0 and self.seldom(3):
            body += (self.group(is_in_region, 1), *self.lines(2, is_in_region))
        commit = self.one_of(["delayed", "at the end", "never"]) if self.seldom() else "at once"
        release = self.number(4) if self.seldom() and not is_in_region else None
        return Group(body, self.one_of("ab"), commit, release)

    def body(self, most: int = 4, is_in_region: bool = False) -> Body:
        parts: list[Part] = []
        for _ in range(1 + self.number(most)):
            if not self.seldom(3):
                parts.append(self.group(is_in_region))
            elif is_in_region or self.seldom(2):
                parts.extend(self.lines(2, is_in_region))
            else:
                parts.append(
                    Region(self.body(3, True), self.one_of(["torch", "reentrant", "ours"]))
                )
        return tuple(parts)

    def op(self) -> Forward | Backward | Call:
        if self.seldom():
            return Call(self.one_of(CALLS), self.number(4), self.one_of(list(CHANGES)))
        stream = self.one_of([0, 0, 0, 1, 2])
        if self.seldom(2):
            how = self.one_of(HOWS) if self.seldom(2) else "whole"
            return Backward(how, self.number(4), stream)
        return Forward(
            stage=self.number(4),
            variant=self.number(2),
            rows=self.one_of([1, 2, 3, 5]),
            needs_grad=not self.seldom(),
            stream=stream,
            is_held=self.seldom(),
            fails_at=self.number(8) if self.seldom(20) else None,
            backward_fails_at=self.number(8) if self.seldom(20) else None,
        )

    def step(self) -> Step:
        ops = tuple(self.op() for _ in range(1 + self.number(8)))
        rest = self.one_of(["fifo", "fifo", "fifo", "lifo", "drop", "keep"])
        return Step(ops, rest, self.seldom(), self.seldom())

    def options(self) -> dict[str, Any]:
        """Of a program, those of the engine among them."""
        if self.seldom():
            return {}
        sizes = ["auto", "auto", 0, 64, 300, 10**6]
        options = {
            "prefetch_bytes": self.one_of(sizes),
            "max_in_flight_bytes": self.one_of(sizes),
            "host_budget_bytes": self.one_of([0, 512, 1024, 4096]) if self.seldom() else None,
            "activation_offload_fraction": self.one_of([1.0, 1.0, 1.0, 0.5, 0.0]),
            "device_limit_bytes": self.one_of([0, 2000, 8000, 10**6]) if self.seldom() else None,
            "tiers": self.one_of([("host",)] * 6 + [("disk",), ("host", "disk")]),
            "verify": self.seldom(20),
            "rematerialize": self.one_of(["cheap", "cheap", "none"]),
        }
        if options["device_limit_bytes"] is not None:  # which goes with no fraction
            del options["activation_offload_fraction"]
        stash = self.one_of([None, None, None, 1, 2, 5])
        return {"stash": stash, "is_fine": self.seldom(2), "options": options}


def drawn(source: random.Random, kinds: Sequence[str] = tuple(COMPUTES)) -> Program:
    """A program of up to three stages and four steps, of some kinds of operators."""
    draw = Draw(source, kinds)
    num_stages, num_steps = 1 + draw.number(3), 1 + draw.number(4)
    return Program(
        tuple(tuple(draw.body() for _ in range(1 + draw.number(2))) for _ in range(num_stages)),
        tuple(draw.step() for _ in range(num_steps)),
        draw.one_of(["late", "random", "eager", "cpu", "cpu threads"]),
        draw.number(100),
        **draw.options(),
    )


# Making smaller


def simpler(value: Any) -> Iterator[Any]:
    """The same with one thing less: a part of a tuple, or a value that is not the default."""
    if isinstance(value, tuple):
        for size in (len(value) // 2, 1) if len(value) > 3 else (1,):
            for begin in range(0, len(value), size):
                yield value[:begin] + value[begin + size :]
        for at, item in enumerate(value):
            inside = [item.body] if isinstance(item, Group | Region) else []
            for others in (*inside, *((other,) for other in simpler(item))):
                yield value[:at] + others + value[at + 1 :]
    elif isinstance(value, dict):
        yield from ({n: v for n, v in value.items() if n != name} for name in value)
    elif is_dataclass(value):
        for each in fields(value):
            present = getattr(value, each.name)
            if each.default is not MISSING and present != each.default:
                yield replace(value, **{each.name: each.default})
            for other in simpler(present):
                yield replace(value, **{each.name: other})
