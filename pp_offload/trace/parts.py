"""The files of ranks: each writes one of its own, which :func:`pp_offload.trace.merge_ranks` joins.

part_of("out.json.gz", 3)      # out.rank3.json.gz
parts_there("out.json.gz")     # those that were written
absence_said("out.json.gz")    # why there is no such file, and what to do
"""

from __future__ import annotations

import os
import re
from pathlib import Path


def part_of(path: str | os.PathLike[str], rank: int) -> Path:
    """The file of one rank: ``out.rank3.json.gz`` of ``out.json.gz``."""
    before, after = _around_rank(Path(path).name)
    return Path(path).with_name(f"{before}{rank}{after}")


def parts_there(path: str | os.PathLike[str]) -> list[Path]:
    """The files of ranks that are there, lowest rank first."""
    before, after = _around_rank(Path(path).name)
    pattern = re.compile(f"{re.escape(before)}([0-9]+){re.escape(after)}")
    folder = Path(path).parent
    found = {
        int(named[1]): one
        for one in (folder.iterdir() if folder.is_dir() else ())
        if (named := pattern.fullmatch(one.name))
    }
    return [found[rank] for rank in sorted(found)]


def absence_said(path: str | os.PathLike[str]) -> str:
    """For an error: that there is no such file, and whether its parts are."""
    parts = parts_there(path)
    if not parts:
        return f"found no file {path}, expected one that a Trace has written"
    num = len(parts) - 1
    others = f" and those of {num} other rank{'s' * (num > 1)}" if num else " of one rank"
    return (
        f"found no file {path}, but {parts[0].name}{others}, expected one of all ranks; when each "
        "has written its own, make it with pp_offload.trace: "
        f'merge_ranks([part_of("{path}", rank) for rank in range(num_ranks)], "{path}")'
    )


def _around_rank(name: str) -> tuple[str, str]:
    """What is before the number of a rank in the name of its file, and behind it."""
    stem, dot, suffixes = name.partition(".")
    if not stem:  # a name that begins with a dot
        return f"{name}.rank", ""
    return f"{stem}.rank", f"{dot}{suffixes}"
