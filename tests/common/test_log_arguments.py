"""What the log is given is text: see NOTE [ Failures in the log ] of errors.py."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import pp_offload

PACKAGE = Path(pp_offload.__file__).parent


def given_failures(source: str) -> Iterator[int]:
    """Lines that give the log an exception they caught."""
    for handler in ast.walk(ast.parse(source)):
        if isinstance(handler, ast.ExceptHandler) and handler.name is not None:
            for call in ast.walk(handler):
                if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("logger."):
                    names = [one.id for one in call.args if isinstance(one, ast.Name)]
                    if handler.name in names or any(one.arg == "exc_info" for one in call.keywords):
                        yield call.lineno


@pytest.mark.parametrize("argument", ["found", "found, exc_info=True", "str(found)"])
def test_what_is_looked_for_is_found(argument: str) -> None:
    source = f"try:\n    run()\nexcept OSError as found:\n    logger.info('%s', {argument})\n"
    assert list(given_failures(source)) == ([] if argument == "str(found)" else [4])


def test_no_failure_is_given_to_the_log() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line in given_failures(path.read_text())
    ]
    assert found == []
