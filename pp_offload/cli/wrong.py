"""What a user is told who gave something that cannot be right."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

import pp_offload
from pp_offload._common.pictures import check_format

PACKAGE = Path(pp_offload.__file__).parent


def wrong(option: str, said: str) -> typer.BadParameter:
    """To be raised: one message, and exit code 2.

    Args:
        option: Which one, as it is typed.
        said: What was found, what was expected, and what to do.
    """
    return typer.BadParameter(said, param_hint=option)


@contextmanager
def told(option: str, *others: type[Exception]) -> Iterator[None]:
    """An error about what this package was given, inside, is one of that option.

    What fails anywhere else, as in the model of a user, keeps its traceback: that is what helps.

    Args:
        option: As it is typed.
        others: Taken beside ``ValueError`` and ``TypeError``, wherever they are raised.
    """
    kinds: tuple[type[Exception], ...] = (ValueError, TypeError, *others)
    try:
        yield
    except kinds as failure:
        if isinstance(failure, others) or _is_ours(failure):
            raise wrong(option, str(failure)) from failure
        raise


def _is_ours(failure: Exception) -> bool:
    """Whether this package has raised it."""
    raised_in = traceback.extract_tb(failure.__traceback__)[-1].filename
    return PACKAGE in Path(raised_in).parents


def check_target(option: str, path: Path | None) -> None:
    """Check that a file can be made, before a long run."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise wrong(option, f"found {path}, expected a file in a directory that is there")


def check_picture(option: str, path: Path | None) -> None:
    """As :func:`check_target`, and that its name ends as pictures do."""
    check_target(option, path)
    if path is not None:
        with told(option):
            check_format(path)
