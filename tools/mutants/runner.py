"""Plants one fault at a time into a copy of the checkout, and runs tests there.

    runner = Runner(checkout, empty_folder)
    verdicts = runner.run(mutants)  # tests first without a fault, then with each
    print(table(verdicts))

A fault counts as caught if a test fails; not if the tests cannot be collected or are not there.
"""

from __future__ import annotations

import argparse
import enum
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

HANG_S = 3600
"""As long as no test of those named takes, on the busiest machine: what runs longer hangs."""

LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")

FAILED = 1
"""What pytest returns if it ran the tests and some failed; more means that it could not."""

CRASHES = {-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGFPE}
"""What is returned if a test read memory that was gone."""


@dataclass(frozen=True)
class Mutant:
    """A fault as data."""

    name: str
    """For ``--only`` and the table."""

    file: str
    """From the root of the checkout."""

    old: str
    """Stands there exactly once."""

    new: str
    """What comes in its place."""

    why: str
    """What goes wrong then."""

    tests: tuple[str, ...]
    """As pytest is given them; at least one is to fail."""

    row: str = ""
    """Of the field table, such as ``F17``, if it shows that the tests of a row can fail: all its
    tests are of that row.
    """


class Outcome(enum.Enum):
    """What became of a mutant."""

    CAUGHT = "caught"
    SURVIVED = "SURVIVED"
    NOT_THERE = "DOES NOT APPLY"
    UNDECIDED = "UNDECIDED"


@dataclass(frozen=True)
class Verdict:
    """One line of the table."""

    name: str
    """The mutant's."""

    outcome: Outcome
    """What became of it."""

    by: str = ""
    """The test that caught it, or what else there is to say."""

    seconds: float = 0.0
    """How long that took."""

    @property
    def is_caught(self) -> bool:
        """Whether all is well."""
        return self.outcome is Outcome.CAUGHT


class NotThereError(ValueError):
    """The text to replace is not in the file exactly once."""


def planted(mutant: Mutant, text: str) -> str:
    """The text of its file with the fault.

    Raises:
        NotThereError: Its old text is not there exactly once.
    """
    count = text.count(mutant.old)
    if count != 1:
        raise NotThereError(
            f"its old text is {count} times in {mutant.file}, expected once; take the text as it "
            "is there now"
        )
    return text.replace(mutant.old, mutant.new)


class Runner:
    """Copies a checkout and runs tests in the copies.

    Args:
        checkout: What is copied; nothing is written there.
        folder: Where the copies go.
        suite: Run all tests on mutants that their own tests let pass.
        fuzz: Run as many random programs on those that these let pass, too.
    """

    def __init__(self, checkout: Path, folder: Path, *, suite: bool = False, fuzz: int = 0) -> None:
        self._checkout = checkout
        self._folder = folder
        self._stages: list[Callable[[Path], tuple[int, str]]] = []
        if suite:
            self._stages.append(lambda copy: self._pytest(copy, ()))
        if fuzz:
            self._stages.append(lambda copy: self._fuzz(copy, fuzz))

    def run(
        self,
        mutants: Sequence[Mutant],
        *,
        jobs: int = 1,
        say: Callable[[Verdict], object] = lambda verdict: None,
    ) -> list[Verdict]:
        """A verdict for each, in order.

        Args:
            mutants: What to plant.
            jobs: How many side by side.
            say: Is told each verdict when it is known.
        """
        tests = tuple(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
        status, output = self._pytest(self._copy("without a fault"), tests)
        if status:  # then a test that fails says nothing about a mutant
            told = Verdict("without a fault", Outcome.UNDECIDED, first_failure(output))
            say(told)
            return [told]

        def judge(mutant: Mutant) -> Verdict:
            verdict = self._judge(mutant)
            say(verdict)
            return verdict

        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(judge, mutants))

    def _judge(self, mutant: Mutant) -> Verdict:
        start = time.perf_counter()
        copy = self._copy(mutant.name)
        try:
            outcome, by = self._outcome(mutant, copy)
        except NotThereError as error:
            outcome, by = Outcome.NOT_THERE, str(error)
        except subprocess.TimeoutExpired:
            outcome, by = Outcome.UNDECIDED, f"ran for {HANG_S} s, which is a hang"
        shutil.rmtree(copy)
        return Verdict(mutant.name, outcome, by, time.perf_counter() - start)

    def _outcome(self, mutant: Mutant, copy: Path) -> tuple[Outcome, str]:
        file = copy / mutant.file
        file.write_text(planted(mutant, file.read_text()))
        for stage in (lambda copy: self._pytest(copy, mutant.tests), *self._stages):
            status, output = stage(copy)
            if status == FAILED:
                return Outcome.CAUGHT, first_failure(output)
            if status in CRASHES:
                return Outcome.CAUGHT, f"a crash: {signal.Signals(-status).name}"
            if status:
                return Outcome.UNDECIDED, f"status {status}: {output.strip()[-300:]}"
        return Outcome.SURVIVED, mutant.why

    def _copy(self, name: str) -> Path:
        copy = self._folder / re.sub(r"\W+", "-", name)
        shutil.copytree(self._checkout, copy, ignore=LEFT_OUT)
        return copy

    def _pytest(self, copy: Path, tests: Sequence[str]) -> tuple[int, str]:
        options = ["-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", "--import-mode=prepend"]
        options += ["--hypothesis-seed=0", "-m", ""]  # also what is slow
        return _python(copy, "-m", "pytest", *options, *tests)

    def _fuzz(self, copy: Path, programs: int) -> tuple[int, str]:
        arguments = ["--programs", str(programs), "--seed", "1"]
        status, output = _python(copy, "tools/fuzzer.py", *arguments)
        return status, f"FAILED {programs} random programs\n{output}" if status else output


def _python(copy: Path, *arguments: str) -> tuple[int, str]:
    """Status and output of Python in the copy, whose package comes before an installed one."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_S,
    )
    return done.returncode, done.stdout


def first_failure(output: str) -> str:
    """The test that failed first, as pytest sums it up; or the last that was said."""
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, flags=re.MULTILINE)
    return found[1] if found else output.strip()[-300:]


def table(verdicts: Sequence[Verdict]) -> str:
    """One line each, and the sum."""
    width = max((len(verdict.name) for verdict in verdicts), default=0)
    lines = [
        f"{one.name:<{width}}  {one.outcome.value:<14}  {one.seconds:6.1f} s  {one.by}"
        for one in verdicts
    ]
    caught = sum(verdict.is_caught for verdict in verdicts)
    return "\n".join([*lines, f"{caught} of {len(verdicts)} caught"])


def main(mutants: Sequence[Mutant], arguments: Sequence[str] | None = None) -> int:
    """What the command does; 0 if every mutant was caught."""
    options = _parse(arguments)
    if unknown := set(options.only) - {known for one in mutants for known in (one.name, one.row)}:
        print(f"no mutant is named {sorted(unknown)}; see --list", file=sys.stderr)
        return 2
    chosen = [one for one in mutants if _is_chosen(one, options)]
    if options.list:
        print("\n".join(map(_line, chosen)))
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        runner = Runner(options.root, Path(folder), suite=options.suite, fuzz=options.fuzz)
        verdicts = runner.run(chosen, jobs=options.jobs, say=_say)
    print(table(verdicts))
    return 0 if all(verdict.is_caught for verdict in verdicts) else 1


def _is_chosen(mutant: Mutant, options: argparse.Namespace) -> bool:
    is_named = not options.only or mutant.name in options.only or mutant.row in options.only
    return is_named and bool(mutant.row or not options.rows)


def _line(mutant: Mutant) -> str:
    row = f"{mutant.row}: " if mutant.row else ""
    return f"{row}{mutant.name}: {mutant.file}: {mutant.why}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python tools/mutants")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="some, by their name or row"
    )
    parser.add_argument("--rows", action="store_true", help="those of rows of the field table")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="mutants side by side")
    parser.add_argument(
        "--suite", action="store_true", help="run the whole suite on those its own tests let pass"
    )
    parser.add_argument(
        "--fuzz", type=int, default=0, metavar="N", help="then N random programs on those left"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to copy")
    return parser.parse_args(arguments)


def _say(verdict: Verdict) -> None:
    """How far it is."""
    print(f"{verdict.name}: {verdict.outcome.value}", file=sys.stderr, flush=True)
