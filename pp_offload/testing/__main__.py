"""Commands for who tests the engine.

python -m pp_offload.testing field   # the failures of engines elsewhere, and how it goes here
python -m pp_offload.testing fuzz    # random programs, with offload and without
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pp_offload.testing import field, fuzz

COMMANDS = {"field": field, "fuzz": fuzz}
"""Modules with ``add_arguments(parser)``, and ``main(options)`` that returns the exit status."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments say; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pp_offload.testing")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").partition("\n")[0]
        module.add_arguments(commands.add_parser(name, help=summary, description=summary))
    options = parser.parse_args(arguments)
    return COMMANDS[options.command].main(options)


if __name__ == "__main__":
    sys.exit(main())
