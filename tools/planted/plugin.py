"""A pytest plugin that plants the fault named by the variable PLANTED: ``-p planted.plugin``."""

from __future__ import annotations

import os

import pytest

from planted import edits, seam


def _plant(name: str) -> None:
    if name in seam.SEAM:
        seam.install(seam.SEAM[name])
    elif name in edits.EDITS:
        edits.install(edits.EDITS[name])
    else:
        raise pytest.UsageError(f"no fault is named {name!r}")


try:
    # Here and not in a hook: tests import the package before any hook of a plugin is called.
    _plant(os.environ["PLANTED"])
except edits.DoesNotApplyError as failure:
    raise pytest.UsageError(f"DOES NOT APPLY: {failure}") from None
