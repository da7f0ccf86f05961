"""Output of a command: text or JSON, and errors of options, with exit code 2."""

from __future__ import annotations

import json
import sys
import traceback
from argparse import ArgumentError
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pp_offload
from pp_offload._common.pictures import check_format

PACKAGE = Path(pp_offload.__file__).parent


def wrong(option: str, problem: str) -> ArgumentError:
    """Make the error of an option as typed; ``main`` prints it without a traceback."""
    return ArgumentError(None, f"Invalid value for {option}: {problem}")


@contextmanager
def errors_of(option: str, *more_kinds: type[Exception]) -> Iterator[None]:
    """Turn errors that this package raises inside into errors of the option.

    Errors of a user's code keep their traceback, except the kinds in ``more_kinds``.
    """
    kinds: tuple[type[Exception], ...] = (ValueError, TypeError, *more_kinds)
    try:
        yield
    except kinds as failure:
        raised_in = traceback.extract_tb(failure.__traceback__)[-1].filename
        if isinstance(failure, more_kinds) or PACKAGE in Path(raised_in).parents:
            raise wrong(option, str(failure)) from failure
        raise


@contextmanager
def any_error_of(option: str, problem: str, how: str) -> Iterator[None]:
    """Turn any error inside, where no user code runs, into an error of the option."""
    try:
        yield
    except Exception as failure:
        kind = type(failure).__name__
        line = (str(failure).splitlines() or [kind])[0]
        raise wrong(option, f"{problem} ({kind}: {line}); {how}") from failure


def check_target(option: str, path: Path | None, *, is_picture: bool = False) -> None:
    """Check that a file can be written, before a long run."""
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        raise wrong(option, f"found {path}, expected a file in a directory that is there")
    if is_picture:
        with errors_of(option):
            check_format(path)


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")


def report(text: str, figures: object, *, as_json: bool) -> None:
    """Print text, or with ``--json`` the figures."""
    say(json.dumps(figures, indent=2) if as_json else text)
