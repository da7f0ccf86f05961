"""Many programs, and the smallest of those that fail.

report = explore(seed=1, programs=500)
report.failure  # a Failure, whose script runs the smallest program that fails as it does
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from multiprocessing import get_context
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from helpers.fuzz.draw import programs as drawn_programs
from helpers.fuzz.programs import Program, script
from helpers.fuzz.run import Report, check

CHUNK = 250
"""Programs that one process runs before it says how it went."""


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

    def __init__(self, failures: Sequence[Failure] = ()) -> None:
        self.counts = Counter[str]()
        self.failures = list(failures)

    def add(self, report: Report) -> None:
        self.counts["programs"] += 1
        self.counts["operations"] += report.num_ops
        self.counts["offloaded"] += report.statistics.bytes_offloaded > 0
        self.counts["computed again"] += report.statistics.bytes_computed_again > 0
        self.counts["refused by autograd"] += report.is_refused

    def merge(self, other: Totals) -> None:
        self.counts += other.counts
        self.failures += other.failures

    def __str__(self) -> str:
        counts = [f"{num} {name}" for name, num in self.counts.items() if name != "programs"]
        return f"{self.counts['programs']} programs, {len(self.failures)} failures; " + ", ".join(
            counts
        )


def explore(number: int, programs: int, backend: str | None = None) -> Totals:
    """Run programs drawn from a seed, until one fails; that one is made small.

    Args:
        number: The seed.
        programs: How many.
        backend: Which runs them all; None for the one that each was drawn with.
    """
    totals, failed = Totals(), []

    @seed(number)
    @settings(
        max_examples=programs,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(drawn_programs())
    def run(program: Program) -> None:
        program = program if backend is None else replace(program, backend=backend)
        try:
            report = check(program)
        except Exception as error:
            if not failed:  # at once, for to make it small may take minutes
                sys.stderr.write(f"{type(error).__name__}: {error}\n{script(program)}\n")
            failed.append(Failure(program, f"{type(error).__name__}: {error}"))
            raise
        if not failed:
            totals.add(report)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run()
        except Exception:
            if not failed:
                raise
            totals.counts["programs"] += 1
            totals.failures.append(failed[-1])
    return totals


def long_run(
    number: int, programs: int, jobs: int, backend: str | None, say: Callable[[str], object]
) -> Totals:
    """Run programs in several processes; stops at the first failure.

    Args:
        number: The seed; each chunk of programs gets its own, drawn from it.
        programs: How many.
        jobs: Processes.
        backend: See :func:`explore`.
        say: Is told how far it is, and what it came to.
    """
    start, totals = time.perf_counter(), Totals()
    for done in in_processes(chunks(number, programs, backend), jobs):
        totals.merge(done)
        say(f"\r{totals}, {time.perf_counter() - start:.0f} s ")
        if totals.failures:
            break
    seconds = time.perf_counter() - start
    say(f"\r{totals}; {seconds:.0f} s, seed {number}\n")
    return totals


def chunks(number: int, programs: int, backend: str | None) -> Iterator[tuple[Any, ...]]:
    """What :func:`explore` is called with, chunk by chunk."""
    for index, begin in enumerate(range(0, programs, CHUNK)):
        yield number * 1_000_003 + index, min(CHUNK, programs - begin), backend


def in_processes(work: Iterator[tuple[Any, ...]], jobs: int) -> Iterator[Totals]:
    """The totals of each chunk, as they come."""
    context = get_context("spawn")  # a fork copies no threads, and torch has some
    with ProcessPoolExecutor(jobs, context, initializer=partial(torch.set_num_threads, 1)) as pool:
        running: set[Future[Totals]] = set()
        try:
            while True:
                for arguments in islice(work, jobs - len(running)):
                    running.add(pool.submit(explore, *arguments))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
