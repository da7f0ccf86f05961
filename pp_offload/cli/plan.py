"""``pp-offload plan``: what each rank keeps, sends away and recomputes, below a limit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pp_offload._common.option_sources import UNITS, parse_size
from pp_offload.cli.pipelines import (
    MIN_NUMEL,
    DeviceOption,
    GibOption,
    GroupsOption,
    HfOption,
    LengthOption,
    MicrobatchesOption,
    MinNumelOption,
    ModelArgument,
    NetworkOption,
    RanksOption,
    RecomputeOption,
    ScheduleOption,
    StagesOption,
    config_of,
    pipeline_of,
    progress_bar,
)
from pp_offload.cli.wrong import check_target, told, wrong
from pp_offload.plan import InfeasibleError, choose, predict, record
from pp_offload.plan.table import table


def plan(
    limit: Annotated[
        str, typer.Option(help="The most that a device may hold: 70GiB. Less its optimizer's.")
    ],
    model: ModelArgument = None,
    hf: HfOption = None,
    schedule: ScheduleOption = "1f1b",
    ranks: RanksOption = 4,
    virtual_stages: StagesOption = None,
    microbatches: MicrobatchesOption = 16,
    length: LengthOption = 4096,
    device: DeviceOption = "H100",
    groups: GroupsOption = None,
    gib: GibOption = None,
    min_numel: MinNumelOption = MIN_NUMEL,
    network_gb: NetworkOption = 50.0,
    recompute: RecomputeOption = True,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan here: plan.json.")
    ] = None,
) -> None:
    """What each rank keeps, sends away and recomputes.

    So that no device holds more than the limit, and a step is as short as was found. The file is
    for OffloadConfig(plan="plan.json").

    Parameters, gradients and activations count. No GPU is needed, and no time is measured.
    """
    config = config_of(gib, min_numel)
    check_target("--output", output)
    limit_bytes = parse_size(limit)
    if limit_bytes is None:
        raise wrong(
            "--limit", f"found {limit!r}, expected bytes with a unit of {', '.join(UNITS)}: 70GiB"
        )
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
        network_gb=network_gb,
    )
    if not recompute:
        pipeline.work.layers = None
    played = pipeline.order, pipeline.work, pipeline.hardware
    with progress_bar() as bar:
        say = None if bar is None else bar("one microbatch of each stage")
        with told(f"{'MODEL' if hf is None else '--hf'} or --schedule"):
            tapes = record(*played, config)
        with told("--schedule"):
            try:
                found = choose(
                    pipeline.order,
                    tapes,
                    pipeline.hardware,
                    limit_bytes,
                    config=config,
                    peers=pipeline.peers,
                    made_for=pipeline.title,
                    progress=None if say is None else lambda num: say(num, None),
                )
            except InfeasibleError as failure:
                raise wrong("--limit", str(failure)) from failure
    if output is not None:
        found.save(output)
    none = predict(pipeline.order, tapes, pipeline.hardware, peers=pipeline.peers, num_steps=1)
    typer.echo(f"{pipeline.title}\n")
    typer.echo(table(found, none))
    if output is not None:
        typer.echo(f'\nwritten to {output}; follow it with OffloadConfig(plan="{output}")')
        if any(names for rank in found.ranks for names in rank.recomputed):
            typer.echo(
                "before that, for each stage of a rank: recompute_layers(module, "
                "plan.rank(rank).recomputed[number])"
            )
