"""``pp-offload simulate``: what a step costs on accelerators that are not here."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from pp_offload.cli.models import from_function, from_hugging_face, with_groups
from pp_offload.cli.wrong import check_target, told, wrong
from pp_offload.config import OffloadConfig
from pp_offload.simulate import DEVICES, Modules, PeerLink
from pp_offload.simulate.compare import compare
from pp_offload.simulate.pipeline import Progress as Told
from pp_offload.simulate.schedules import SCHEDULES, checked_stages, order_of
from pp_offload.trace import Trace

GIB, GB = 2**30, 10**9


def simulate(
    model: Annotated[
        str | None,
        typer.Argument(help="module:function, which returns the stages; docs/cli.md has one."),
    ] = None,
    hf: Annotated[
        str | None,
        typer.Option(help="In its place a config.json of Transformers, or its directory."),
    ] = None,
    schedule: Annotated[
        str, typer.Option(help=f"{', '.join(SCHEDULES)}, or a CSV file of actions.")
    ] = "1f1b",
    ranks: Annotated[int, typer.Option(min=1, help="Devices of the pipeline.")] = 4,
    virtual_stages: Annotated[
        int | None,
        typer.Option(
            min=1, help="Stages per rank; the least that the schedule takes if not given."
        ),
    ] = None,
    microbatches: Annotated[int, typer.Option(min=1, help="Of a step.")] = 16,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a microbatch.")] = 4096,
    device: Annotated[str, typer.Option(help=f"{', '.join(DEVICES)}.")] = "H100",
    groups: Annotated[
        str | None, typer.Option(help="Which of the model's groups leave, with commas; all if not.")
    ] = None,
    fraction: Annotated[
        float, typer.Option(min=0, max=1, help="Of each rank's groups, that leaves.")
    ] = 1.0,
    gib: Annotated[
        float | None,
        typer.Option(min=0, help="May be on its way, each way; the engine chooses if not given."),
    ] = None,
    host_gib: Annotated[
        float | None, typer.Option(min=0, help="Host memory of a rank; what it needs if not given.")
    ] = None,
    min_numel: Annotated[
        int, typer.Option(min=0, help="Tensors of fewer elements stay.")
    ] = OffloadConfig().min_offloaded_tensor_size,
    network_gb: Annotated[float, typer.Option(help="GB/s from rank to rank.")] = 50.0,
    trace: Annotated[
        Path | None, typer.Option(help="Write the steps with offload here: out.json.gz.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print figures in JSON instead of a table.")
    ] = False,
) -> None:
    """What a step costs on devices that are not here.

    Of a pipeline, without and with offload: a row for each rank.

    The engine runs as it is, on tensors without data and streams with clocks: no GPU is needed, and
    no time is measured.
    """
    if (model is None) == (hf is None):
        given = "neither" if model is None else "both"
        raise wrong("MODEL", f"found {given} of module:function and --hf, expected one of the two")
    if device not in DEVICES:
        raise wrong("--device", f"found {device!r}, expected one of {', '.join(DEVICES)}")
    numbers = {"--gib": gib, "--host-gib": host_gib, "--network-gb": network_gb}
    for option, number in numbers.items():
        if number is not None and not isfinite(number):
            raise wrong(option, f"found {number}, expected a finite number")
    if network_gb <= 0:
        raise wrong("--network-gb", f"found {network_gb:g}, expected a number above 0")
    check_target("--trace", trace)
    with told("--schedule"):
        num_stages = checked_stages(schedule, virtual_stages)
        order = order_of(
            schedule,
            num_ranks=ranks,
            stages_per_rank=num_stages,
            num_microbatches=microbatches,
        )
    sizes = {"num_stages": ranks * num_stages, "length": length}
    if hf is not None:
        work = from_hugging_face(hf, **sizes)
    else:
        assert model is not None
        work = from_function(model, **sizes)
    work = with_groups(work, groups)
    config = _config(fraction, gib, host_gib, min_numel)
    hardware = DEVICES[device]
    with _bar() as bar, told("MODEL" if hf is None else "--hf"):
        found = compare(
            order,
            work,
            hardware,
            config=config,
            peers=PeerLink(bytes_per_s=network_gb * GB),
            progress=bar,
            trace=None if trace is None else Trace(trace),
        )
    if as_json:
        typer.echo(json.dumps(found.figures(), indent=2))
        return
    typer.echo(
        f"{model or hf} on {ranks} virtual {device}, {schedule}, {num_stages} "
        f"stage{'s' * (num_stages > 1)} each, {microbatches} microbatches of {length} tokens; "
        f"{_leaving(work)}\n"
    )
    typer.echo(found.table(hardware.memory_bytes))


def _leaving(work: Modules) -> str:
    names = "groups that the model marks" if work.groups is None else " and ".join(work.groups)
    return f"{names} may leave"


def _config(
    fraction: float, gib: float | None, host_gib: float | None, min_numel: int
) -> OffloadConfig:
    ahead: Any = "auto" if gib is None else int(gib * GIB)
    return OffloadConfig(
        activation_offload_fraction=fraction,
        max_in_flight_bytes=ahead,
        prefetch_bytes=ahead,
        host_budget_bytes=None if host_gib is None else int(host_gib * GIB),
        min_offloaded_tensor_size=min_numel,
    )


@contextmanager
def _bar() -> Iterator[Any]:
    """Gives what shows how far a run is; None where nobody looks."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:

        def shown(name: str) -> Told:
            task = progress.add_task(name, total=None)
            return lambda done, total: progress.update(task, completed=done, total=total)

        yield shown
