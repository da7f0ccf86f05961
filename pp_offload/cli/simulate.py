"""``pp-offload simulate``: what a step costs on accelerators that are not here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from pp_offload.cli.pipelines import (
    MIN_NUMEL,
    GibOption,
    HostGibOption,
    MakePipeline,
    MinNumelOption,
    NetworkOption,
    TiersOption,
    config_of,
    on_pipeline,
    peers_of,
    progress_bar,
)
from pp_offload.cli.wrong import check_target, told
from pp_offload.simulate.compare import compare
from pp_offload.trace import Trace


@on_pipeline
def simulate(
    made: MakePipeline,
    fraction: Annotated[
        float, typer.Option(min=0, max=1, help="Of each rank's groups, that leaves.")
    ] = 1.0,
    plan: Annotated[
        Path | None,
        typer.Option(help="In place of a fraction a plan, as pp-offload plan has written it."),
    ] = None,
    gib: GibOption = None,
    host_gib: HostGibOption = None,
    tiers: TiersOption = "host",
    min_numel: MinNumelOption = MIN_NUMEL,
    network_gb: NetworkOption = 50.0,
    trace: Annotated[
        Path | None, typer.Option(help="Write the steps with offload here: out.json.gz.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print figures in JSON instead of a table.")
    ] = False,
) -> None:
    """What a step costs on devices that are not here.

    Of a pipeline, without and with offload: a row for each rank. The exit code is 1 where one is
    above the limit of its plan.

    The engine runs as it is, on tensors without data and streams with clocks: no GPU is needed, and
    no time is measured.
    """
    others = config_of(min_numel, gib=gib, host_gib=host_gib, tiers=tiers)
    peers = peers_of(network_gb)
    check_target("--trace", trace)
    pipeline = made()
    with told("--plan"):
        config = replace(others, activation_offload_fraction=fraction, plan=plan)
        if config.offload_plan is not None:
            config.offload_plan.rank(pipeline.order.num_ranks - 1)
    with progress_bar() as bar, pipeline.told():
        found = compare(
            pipeline.order,
            pipeline.work,
            pipeline.hardware,
            config=config,
            peers=peers,
            progress=bar,
            trace=None if trace is None else Trace(trace),
        )
    if as_json:
        typer.echo(json.dumps(found.figures(), indent=2))
    else:
        typer.echo(f"{pipeline.title}\n")
        typer.echo(found.table(pipeline.hardware.memory_bytes))
    if found.above_the_limit:
        raise typer.Exit(1)
