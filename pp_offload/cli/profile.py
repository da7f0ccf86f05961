"""``pp-offload profile``: what a pipeline is made of, before a limit is set."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from pp_offload.cli.pipelines import (
    MIN_NUMEL,
    DeviceOption,
    GroupsOption,
    HfOption,
    LengthOption,
    MicrobatchesOption,
    MinNumelOption,
    ModelArgument,
    RanksOption,
    RecomputeOption,
    ScheduleOption,
    StagesOption,
    config_of,
    pipeline_of,
)
from pp_offload.cli.wrong import told
from pp_offload.plan import profile as profile_of
from pp_offload.plan import record
from pp_offload.plan.profile_table import profile_table


def profile(
    model: ModelArgument = None,
    hf: HfOption = None,
    schedule: ScheduleOption = "1f1b",
    ranks: RanksOption = 4,
    virtual_stages: StagesOption = None,
    microbatches: MicrobatchesOption = 16,
    length: LengthOption = 4096,
    device: DeviceOption = "H100",
    groups: GroupsOption = None,
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
    pipeline = pipeline_of(
        model,
        hf,
        schedule=schedule,
        ranks=ranks,
        virtual_stages=virtual_stages,
        microbatches=microbatches,
        length=length,
        device=device,
        groups=groups,
        network_gb=50.0,
    )
    if not recompute:
        pipeline.work.layers = None
    config = config_of(None, min_numel)
    with told(f"{pipeline.option} or --schedule"):
        tapes = record(pipeline.order, pipeline.work, pipeline.hardware, config)
    found = profile_of(tapes, pipeline.hardware)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
        return
    typer.echo(f"{pipeline.title}\n")
    typer.echo(profile_table(found))
