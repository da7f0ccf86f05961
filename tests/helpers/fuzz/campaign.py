"""Many programs, and the smallest of those that fail.

totals = explore(seed=1, programs=500)
totals.failures  # each a Failure, whose script runs the smallest program that fails as it does
"""

from __future__ import annotations

import random
import sys
import warnings
from collections import Counter
from dataclasses import dataclass, replace

from helpers.fuzz.programs import Program, drawn, script, simpler
from helpers.fuzz.run import check


@dataclass(frozen=True)
class Failure:
    """A program that failed, as small as it could be made."""

    program: Program
    error: str

    def script(self) -> str:
        """A file that runs it, with what it says at the top."""
        error = "".join(f"# {line}\n" for line in self.error.splitlines())
        return error + script(self.program)


class Totals:
    """What was run: counts by what they are of, and programs that failed."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self.failures: list[Failure] = []

    def __str__(self) -> str:
        counts = [f"{num} {name}" for name, num in self.counts.items() if name != "programs"]
        head = f"{self.counts['programs']} programs, {len(self.failures)} failures; "
        return head + ", ".join(counts)


def explore(seed: int, programs: int, backend: str | None = None) -> Totals:
    """Run programs drawn from a seed, until one fails; that one is made small.

    Args:
        seed: Of the programs.
        programs: How many.
        backend: Which runs them all; None for the one that each was drawn with.
    """
    totals = Totals()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(programs):
            program = drawn(random.Random(f"{seed} {number}"))
            program = program if backend is None else replace(program, backend=backend)
            totals.counts["programs"] += 1
            try:
                report = check(program)
            except Exception as error:
                # At once, for to make it small may take minutes.
                sys.stderr.write(f"{text_of(error)}\n{script(program)}\n")
                totals.failures.append(shrunk(Failure(program, text_of(error)), type(error)))
                break
            totals.counts["operations"] += report.num_ops
            totals.counts["offloaded"] += report.statistics.bytes_offloaded > 0
            totals.counts["computed again"] += report.statistics.bytes_computed_again > 0
            totals.counts["refused by autograd"] += report.is_refused
    return totals


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
