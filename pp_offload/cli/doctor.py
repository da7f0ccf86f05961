"""``pp-offload doctor``: what is here, for a bug report."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from pp_offload.cli.machine import MIB, Facts, facts_of
from pp_offload.cli.wrong import wrong


def doctor(
    disk_dir: Annotated[
        Path | None,
        typer.Option(help="Whose disk is tried; that of temporary files if not given."),
    ] = None,
    disk_mib: Annotated[
        int, typer.Option(min=0, help="Written there and read, and gone at once; 0 for none.")
    ] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print it in JSON.")] = False,
) -> None:
    """What is here, for a bug report.

    Devices, versions, memory and its limits, how fast the disk is, what the environment says.

    It names no user, no host and no path. What cannot be found says why.
    """
    if disk_dir is not None and not disk_dir.is_dir():
        raise wrong("--disk-dir", f"found {disk_dir}, expected a directory that is there")
    found = facts_of(disk_dir or Path(tempfile.gettempdir()), disk_mib * MIB)
    typer.echo(json.dumps(found, indent=2) if as_json else report(found))


def report(found: dict[str, Facts]) -> str:
    """All topics as text."""
    lines = []
    for topic, facts in found.items():
        width = max(map(len, facts))
        lines += [topic, *(f"  {name.ljust(width)}  {value}" for name, value in facts.items()), ""]
    return "\n".join(lines).rstrip()
