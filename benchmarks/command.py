"""The options that the benchmarks have alike.

options = parser_for(__doc__).parse_args()
write_figures(figures(options.quick), options.json)
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def parser_for(doc: str | None) -> argparse.ArgumentParser:
    """With ``--quick`` and ``--json``; the module's docstring says what its figures are."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few and small; figures mean little")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser


def write_figures(figures: Any, path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n")
