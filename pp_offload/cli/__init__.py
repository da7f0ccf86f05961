"""The command line: ``pp-offload``, or ``python -m pp_offload.cli``.

Help and the version are printed without torch, whose import takes seconds.
"""

from __future__ import annotations

import sys
from argparse import ArgumentError
from collections.abc import Sequence

from pp_offload.cli.arguments import parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command of ``arguments``, those of the process when None, and exit."""
    top = parser()
    given = top.parse_args(arguments)
    if given.command is None:
        top.print_help(sys.stderr)
        top.exit(2)
    from pp_offload.cli import commands

    try:
        sys.exit(getattr(commands, given.command)(given))
    except ArgumentError as failure:
        given.error(str(failure))
    except KeyboardInterrupt:
        top.exit(1, "Aborted!\n")
