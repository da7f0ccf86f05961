"""Interrupts at a chosen line, as a signal handler raises them between any two.

for number in every_line(step):
    with interrupted(number):
        step()
"""

from __future__ import annotations

import dis
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pp_offload

ROOT = Path(pp_offload.__file__).parent
ENGINE = ROOT / "_transfer" / "engine.py"
FILES = {
    str(path)
    for path in [
        *ROOT.glob("_memory/*.py"),
        *ROOT.glob("_transfer/disk_*.py"),
        ROOT / "_transfer" / "on_disk.py",
        ROOT / "_transfer" / "block.py",
        ROOT / "_common" / "workers.py",
        ROOT / "backends" / "cpu.py",
    ]
}


class Interrupt(BaseException):
    """As a KeyboardInterrupt, but for certain this one."""


class Lines:
    """Counts the lines that run, and raises at one.

    Args:
        number: Of that line, from 1; None for none.
        not_inside: Names of functions of ``transfer.py``; what they call is not looked at.
    """

    def __init__(self, number: int | None, not_inside: Collection[str] = ()) -> None:
        self.number = number
        self.not_inside = not_inside
        self.count = 0
        self.was_at = ""
        self.places: list[tuple[CodeType, int]] = []

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not is_looked_at(frame.f_code):
            return None
        return None if self.not_inside and self._is_inside(frame) else self._line

    def _is_inside(self, frame: FrameType | None) -> bool:
        while frame is not None:
            code = frame.f_code
            if code.co_name in self.not_inside and code.co_filename == str(ENGINE):
                return True
            frame = frame.f_back
        return False

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and not leaves_a_with(frame):
            self.count += 1
            self.places.append((frame.f_code, frame.f_lineno))
            if self.count == self.number:
                code = frame.f_code
                self.was_at = f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_qualname}"
                raise Interrupt(self.was_at)
        return self._line


def leaves_a_with(frame: FrameType) -> bool:
    """Whether it is about to call ``__exit__``. No signal is handled before that call.

    Raised there, an interrupt would leave a lock held for the rest of the process.
    """
    code = frame.f_code.co_code[frame.f_lasti :: 2]  # each instruction has two bytes
    names = [dis.opname[operation] for operation in code[:4]]
    if names[0] == "SWAP":  # below what is returned
        del names[0]
    return names[0] == "PUSH_EXC_INFO" or names[:3] == ["LOAD_CONST"] * 3


def is_looked_at(code: CodeType) -> bool:
    """Not in destructors, where Python only prints what is raised."""
    if code.co_name == "__del__":
        return False
    return code.co_filename in FILES


@contextmanager
def interrupted(number: int | None, not_inside: Collection[str] = ()) -> Iterator[Lines]:
    """The line of this number raises :class:`Interrupt`, which does not leave the block."""
    lines, before = Lines(number, not_inside), sys.gettrace()
    sys.settrace(lines)
    try:
        yield lines
    except Interrupt:
        pass
    finally:
        sys.settrace(before)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """What other threads do: signals do not come there."""
    before = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(before)


def every_line(
    step: Callable[[], object], not_inside: Collection[str] = (), num_visits: int = 3
) -> list[int]:
    """Numbers of the lines that ``step`` runs through, each at its first few visits."""
    with interrupted(None, not_inside) as lines:
        step()
    visits: Counter[tuple[CodeType, int]] = Counter()
    numbers: list[int] = []
    for number, place in enumerate(lines.places, 1):
        visits[place] += 1
        if visits[place] <= num_visits:
            numbers.append(number)
    return numbers
