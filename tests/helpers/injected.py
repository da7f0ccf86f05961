"""An exception at any line of chosen files, as a signal's handler may raise it there.

    points = points_in(files("_common/workers", "_memory/arena"), run)      # where it could be
    with interrupt_at(points[7].number, files("_common/workers", "_memory/arena")):
        run()                                                 # raises Injected

Lines are counted as they are run, so the same line may have many numbers. Only the thread that
enters the context is watched, for only the main thread of a program runs handlers.
"""

from __future__ import annotations

import dis
import linecache
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pp_offload

ROOT = Path(pp_offload.__file__).parent


class Injected(BaseException):
    """Expected by nobody: neither an error of the program nor one of the engine."""


@dataclass(frozen=True)
class Point:
    """A line that is about to run."""

    number: int
    """How many lines of these files ran before it."""
    file: str
    """Its module, from the root of the package on."""
    line: int


def files(*patterns: str) -> frozenset[str]:
    """Paths of modules of the package: ``_common/workers``, ``_memory/*``."""
    paths = {pattern: [*map(str, ROOT.glob(f"{pattern}.py"))] for pattern in patterns}
    assert all(paths.values()), paths
    return frozenset().union(*paths.values())


def leaves_a_with(frame: FrameType) -> bool:
    """Whether it is about to call ``__exit__``. No signal is handled before that call.

    Raised there, an interrupt would leave a lock held for the rest of the process.
    """
    code = frame.f_code.co_code[frame.f_lasti :: 2]  # each instruction has two bytes
    names = [dis.opname[operation] for operation in code[:4]]
    if names[0] == "SWAP":  # below what is returned
        del names[0]
    return names[0] == "PUSH_EXC_INFO" or names[:3] == ["LOAD_CONST"] * 3


def pops_hooks(frame: FrameType) -> bool:
    """Whether its line pops hooks in one call in C. No signal is handled before that call."""
    return "maxlen=0" in linecache.getline(frame.f_code.co_filename, frame.f_lineno)


@contextmanager
def _each_line(paths: Collection[str], visit: Callable[[Point], None]) -> Iterator[None]:
    """Call ``visit`` before every line of ``paths`` that this thread runs."""
    number = -1

    def line(frame: FrameType, event: str, _: object) -> Any:
        nonlocal number
        if event == "line" and not leaves_a_with(frame) and not pops_hooks(frame):
            number += 1
            path = Path(frame.f_code.co_filename)
            name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
            visit(Point(number, name.as_posix(), frame.f_lineno))
        return line

    def call(frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        # Not in destructors, where Python only prints what is raised.
        return line if code.co_filename in paths and code.co_name != "__del__" else None

    before = sys.gettrace()  # that of a debugger, or of a measurement of coverage
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def interrupt_at(number: int, paths: Collection[str]) -> Iterator[list[Point]]:
    """Raise :class:`Injected` instead of the line with this number, counted from 0; yields it."""
    done: list[Point] = []

    def visit(point: Point) -> None:
        if point.number == number and not done:
            done.append(point)
            raise Injected(str(point))

    with _each_line(paths, visit):
        yield done


def points_in(paths: Collection[str], run: Callable[[], object]) -> list[Point]:
    """The lines of ``paths`` that ``run`` runs, in order."""
    points: list[Point] = []
    with _each_line(paths, points.append):
        run()
    return points


def chosen(points: Sequence[Point], *, every: int) -> list[Point]:
    """Of all distinct lines in the order in which they first run, every so many; of each, one time.

    Which of the times it runs differs from line to line, for the first is seldom the worst.
    """
    times: dict[tuple[str, int], list[Point]] = {}
    for point in points:
        times.setdefault((point.file, point.line), []).append(point)
    lines = list(times.values())[::every]
    return [runs[(5 * place) % len(runs)] for place, runs in enumerate(lines)]
