"""A line of the engine left out, in this process: the rest of its function stays as it is.

RELOADS = "_transfer/pending_reloads:PendingReloads"
FAULT = Fault(f"{RELOADS}.keep_few_abandoned", "stream.wait_event(reloaded)")
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
    """Its module in the package, and its name there: ``_transfer/engine:TransferEngine.join``."""

    line: str
    """What must be there exactly once. Short, so that it outlives what is written around it."""

    instead: str = "pass"
    """What stands there then."""

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        """Replace the function by one without the line."""
        path, _, name = f"pp_offload.{self.function.replace('/', '.')}".rpartition(
            "." if "." in self.function.partition(":")[2] else ":"
        )
        owner = resolve_name(path)
        source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
        assert source.count(self.line) == 1, f"{self.line!r} is not once in {self.function}"
        module = inspect.getmodule(owner)
        found: dict[str, Any] = {}
        exec(source.replace(self.line, self.instead), vars(module), found)
        patch.setattr(owner, name, found[name])
