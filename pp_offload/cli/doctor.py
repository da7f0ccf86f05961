"""``pp-offload doctor``: what is here, for a bug report."""

from __future__ import annotations

import json
import platform
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from pp_offload.backends import default_backend
from pp_offload.cli.device_speed import DeviceSpeed
from pp_offload.cli.disk_speed import disk_speed
from pp_offload.cli.machine import MIB, Facts, facts_of
from pp_offload.cli.wrong import check_target, wrong


def doctor(
    disk_dir: Annotated[
        Path | None,
        typer.Option(help="Whose disk is tried; that of temporary files if not given."),
    ] = None,
    disk_mib: Annotated[
        int, typer.Option(min=0, help="Written there and read, and gone at once; 0 for none.")
    ] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print it in JSON.")] = False,
    measure: Annotated[
        Path | None,
        typer.Option(help="Measure the device, for --hardware of other commands: out.json."),
    ] = None,
    measure_mib: Annotated[
        int, typer.Option(min=1, help="Of a copy that is timed; products get less with less.")
    ] = 256,
) -> None:
    """What is here, for a bug report.

    Devices, versions, memory and its limits, how fast the disk is, what the environment says.
    With --measure also rates of the device and its link, and what launches and pinning cost: the
    accelerator's, or the CPU's where there is none. It takes less than a minute.

    It names no user, no host and no path. What cannot be found says why.
    """
    if disk_dir is not None and not disk_dir.is_dir():
        raise wrong("--disk-dir", f"found {disk_dir}, expected a directory that is there")
    check_target("--measure", measure)
    directory = disk_dir or Path(tempfile.gettempdir())
    if measure is not None:
        measured = _measured(measure_mib * MIB, directory, disk_mib * MIB)
        measure.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    found = facts_of(directory, disk_mib * MIB)
    typer.echo(json.dumps(found, indent=2) if as_json else report(found))


def _measured(nbytes: int, directory: Path, disk_bytes: int) -> dict[str, dict[str, object]]:
    """What ``Hardware.from_file`` reads, and of which machine it is."""
    hardware = DeviceSpeed(default_backend().device, nbytes).hardware()
    if disk_bytes:
        disk = disk_speed(directory, disk_bytes)
        hardware = replace(
            hardware,
            disk_write_bytes_per_s=disk.write_bytes_per_s,
            disk_read_bytes_per_s=disk.read_bytes_per_s,
        )
    machine: dict[str, object] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    return {"machine": machine, "hardware": asdict(hardware)}


def report(found: dict[str, Facts]) -> str:
    """All topics as text."""
    lines = []
    for topic, facts in found.items():
        width = max(map(len, facts))
        lines += [topic, *(f"  {name.ljust(width)}  {value}" for name, value in facts.items()), ""]
    return "\n".join(lines).rstrip()
