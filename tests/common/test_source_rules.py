"""Rules of the package's source: devices of new tensors, and failures in the log."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helpers.sources import TREES, dotted
from torch.utils._device import _device_constructors

FACTORIES = {f"torch.{factory.__name__}" for factory in _device_constructors()}


def without_device(tree: ast.AST) -> Iterator[int]:
    """Calls of factories without a device: ``torch.set_default_device`` would choose it."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and dotted(call.func) in FACTORIES:
            if not {keyword.arg for keyword in call.keywords} & {"device", None}:
                yield call.lineno


def given_failures(tree: ast.AST) -> Iterator[int]:
    """Calls that give the log a caught exception: see NOTE [ Failures in the log ] of errors.py."""
    for handler in ast.walk(tree):
        if isinstance(handler, ast.ExceptHandler) and handler.name is not None:
            for call in ast.walk(handler):
                if isinstance(call, ast.Call) and dotted(call.func).startswith("logger."):
                    names = [arg.id for arg in call.args if isinstance(arg, ast.Name)]
                    keywords = [keyword.arg for keyword in call.keywords]
                    if handler.name in names or "exc_info" in keywords:
                        yield call.lineno


def test_the_source_follows_the_rules() -> None:
    in_log = "try:\n    run()\nexcept OSError as failure:\n    logger.info('%s', {})\n".format
    assert list(without_device(ast.parse("torch.tensor([1.0], requires_grad=True)")))
    assert list(given_failures(ast.parse(in_log("failure"))))
    assert not list(given_failures(ast.parse(in_log("1"))))
    for file, tree in TREES.items():
        assert not [*without_device(tree), *given_failures(tree)], file
