"""Pages of the documentation, and the scripts beside them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]

DOCS = ROOT / "docs"

PATHS = {
    path.relative_to(ROOT).with_suffix("").as_posix().removeprefix("docs/"): path
    for path in (*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md")))
}

PAGES = {name: path.read_text() for name, path in PATHS.items()}


def script(name: str) -> ModuleType:
    """A script of docs/, imported."""
    sys.path.insert(0, str(DOCS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(DOCS))
