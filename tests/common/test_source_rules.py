"""Rules of the package's source: devices of new tensors, and failures in the log."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from torch.utils._device import _device_constructors

import pp_offload

PACKAGE = Path(pp_offload.__file__).parent

FACTORIES = {factory.__name__ for factory in _device_constructors()}


def without_device(source: str) -> Iterator[int]:
    """Calls of factories without a device: ``torch.set_default_device`` would choose it."""
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            names = {keyword.arg for keyword in call.keywords}
            is_factory = ast.unparse(call.func.value) == "torch" and call.func.attr in FACTORIES
            if is_factory and not names & {"device", None}:
                yield call.lineno


def given_failures(source: str) -> Iterator[int]:
    """Calls that give the log a caught exception: see NOTE [ Failures in the log ] of errors.py."""
    for handler in ast.walk(ast.parse(source)):
        if isinstance(handler, ast.ExceptHandler) and handler.name is not None:
            for call in ast.walk(handler):
                if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("logger."):
                    names = [arg.id for arg in call.args if isinstance(arg, ast.Name)]
                    keywords = [keyword.arg for keyword in call.keywords]
                    if handler.name in names or "exc_info" in keywords:
                        yield call.lineno


def test_the_source_follows_the_rules() -> None:
    in_log = "try:\n    run()\nexcept OSError as failure:\n    logger.info('%s', {})\n".format
    assert list(without_device("torch.tensor([1.0], requires_grad=True)"))
    assert list(given_failures(in_log("failure"))) and not list(given_failures(in_log("1")))
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text()
        assert not [*without_device(source), *given_failures(source)], path
