"""``pp-offload profile``: what a pipeline is made of, before a limit is set."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from pp_offload.cli.pipelines import (
    MIN_NUMEL,
    MakePipeline,
    MinNumelOption,
    RecomputeOption,
    config_of,
    on_pipeline,
)
from pp_offload.plan import profile as profile_of
from pp_offload.plan import record
from pp_offload.plan.profile_table import profile_table


@on_pipeline
def profile(
    made: MakePipeline,
    min_numel: MinNumelOption = MIN_NUMEL,
    recompute: RecomputeOption = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print figures in JSON instead of tables.")
    ] = False,
) -> None:
    """What groups save, and what stages take.

    Bytes, compute and copies of each kind of group, and memory and times of each stage, of one
    microbatch: what is worth sending away, and what recomputation would take in its place.

    No GPU is needed, and no time is measured.
    """
    pipeline = made()
    if not recompute:
        pipeline.work.layers = None
    config = config_of(min_numel)
    with pipeline.told("--schedule"):
        tapes = record(pipeline.order, pipeline.work, pipeline.hardware, config)
    found = profile_of(tapes, pipeline.hardware)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
        return
    typer.echo(f"{pipeline.title}\n")
    typer.echo(profile_table(found))
