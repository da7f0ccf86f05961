"""A line of the engine left out, in this process: the rest of its function stays as it is.

FAULT = Fault("_core/mover:Mover.reload", "h2d.wait_event(batch.offloaded)")
FAULT.plant(monkeypatch)
"""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import pytest


@dataclass(frozen=True)
class Fault:
    """What is left out, and where."""

    function: str
    """Its module in the package, and its name there: ``_core/mover:Mover.join``."""

    line: str
    """What must be there exactly once. Short, so that it outlives what is written around it."""

    instead: str = "pass"
    """What stands there then."""

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        """Give the function the code of one without the line, wherever it was imported to."""
        path, _, name = f"pp_offload.{self.function.replace('/', '.')}".rpartition(
            "." if "." in self.function.partition(":")[2] else ":"
        )
        owner = resolve_name(path)
        function = getattr(owner, name)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.line) == 1, f"{self.line!r} is not once in {self.function}"
        module = inspect.getmodule(owner)
        found: dict[str, Any] = {}
        exec(source.replace(self.line, self.instead), vars(module), found)
        patch.setattr(_function(function), "__code__", _function(found[name]).__code__)


def _function(method: Any) -> Any:
    """Of a class or static method, the function."""
    return getattr(method, "__func__", method)
