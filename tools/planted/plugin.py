"""A pytest plugin that plants the fault named by the variable PLANTED: ``-p planted.plugin``."""

from __future__ import annotations

import os

import pytest

from planted.faults import FAULTS

# Here and not in a hook: tests import the package before any hook of a plugin is called.
try:
    FAULTS[os.environ["PLANTED"]].plant(pytest.MonkeyPatch())
except (AttributeError, ImportError, ValueError) as failure:
    raise pytest.UsageError(f"DOES NOT APPLY: {failure}") from None
