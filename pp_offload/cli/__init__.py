"""The command line: ``pp-offload``, or ``python -m pp_offload.cli``.

It takes the extra ``cli``. Who has it not is told so, in one line, with the names of its packages:
pp_offload itself may be in no package index.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

NEEDS = (
    "pp-offload needs typer and rich, which are not installed; pip install typer rich, and "
    "matplotlib for pictures, or in a checkout of pp_offload: pip install '.[cli,plots]'"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command, and exit.

    Args:
        arguments: Those of the process when None.
    """
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError:
        sys.stderr.write(NEEDS + "\n")
        raise SystemExit(2) from None
    from pp_offload.cli.app import app

    app(args=None if arguments is None else list(arguments), prog_name="pp-offload")
