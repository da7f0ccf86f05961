"""The flag ``--picture`` of examples that have ``--trace``."""

from __future__ import annotations

import argparse
import importlib.util

from pp_offload.trace.picture import FORMATS, NEEDS


def check_picture(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Say what is wrong with it before anything runs."""
    path = options.picture
    if path is None:
        return
    if options.trace is None:
        parser.error("--picture draws what --trace wrote; add --trace out.json.gz")
    if path.suffix not in FORMATS or not path.parent.is_dir():
        parser.error(
            f"--picture is {path}, expected a file in a directory that is there, which ends in one "
            f"of {', '.join(FORMATS)}"
        )
    if importlib.util.find_spec("matplotlib") is None:
        parser.error(f"--picture: {NEEDS}")
