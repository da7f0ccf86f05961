"""New tensors say where they are: ``torch.set_default_device`` would put them somewhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

import pp_offload

PACKAGE = Path(pp_offload.__file__).parent

FACTORIES = {one.__name__ for one in _device_constructors()}


def without_device(source: str) -> Iterator[str]:
    """Calls of factories that leave the device to the program."""
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            said = {one.arg for one in call.keywords}
            is_factory = ast.unparse(call.func.value) == "torch" and call.func.attr in FACTORIES
            if is_factory and not said & {"device", None}:
                yield f"line {call.lineno}: {ast.unparse(call)}"


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("torch.empty(3)", True),
        ("torch.tensor([1.0], requires_grad=True)", True),
        ("torch.empty(3, device='cpu')", False),
        ("torch.empty(3, **kind)", False),
        ("torch.empty_like(x)", False),
        ("torch.frombuffer(x)", False),
    ],
)
def test_what_is_looked_for_is_found(code: str, is_found: bool) -> None:
    assert bool(list(without_device(code))) is is_found


def test_every_factory_is_told_the_device() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}, {line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line in without_device(path.read_text())
    ]
    assert found == []
