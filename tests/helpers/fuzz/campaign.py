"""Many programs, and the smallest of those that fail.

counts, failure = explore(seed=1, programs=500)
failure.script()  # runs the smallest program that fails as it does
"""

from __future__ import annotations

import random
import sys
import warnings
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from helpers.fuzz.programs import Program, drawn, script, simpler
from helpers.fuzz.run import check


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
