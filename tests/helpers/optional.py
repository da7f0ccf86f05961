"""What tests need besides torch, numpy and pytest; files that import what is missing are skipped.

A machine with a GPU and without an index has what came with torch. The wheel is installed there
with ``pip install --no-deps --no-index``, and ``pytest -m gpu`` runs what it can.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from types import ModuleType

import pytest

OPTIONAL = frozenset({"hypothesis", "matplotlib", "ninja", "transformers", "xdist", "xxhash"})


class _Skips(MetaPathFinder):
    """Asked last, for what no other has found."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        package = fullname.partition(".")[0]
        if package in OPTIONAL and not _is_only_asked():
            pytest.skip(f"{package} is not installed", allow_module_level=True)


def _is_only_asked() -> bool:
    """Whether ``importlib.util.find_spec`` looks, as torch's compiler does when it is imported."""
    frame = sys._getframe(2)
    while frame.f_globals["__name__"] == "importlib._bootstrap" and frame.f_back is not None:
        frame = frame.f_back
    return bool(frame.f_globals["__name__"] == "importlib.util")


@contextmanager
def skips_what_needs_more() -> Iterator[None]:
    """Inside, importing an optional package that is missing skips the file that is collected."""
    finder = _Skips()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
