"""``pp-offload compare``: what a plan has said beside what a run has done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pp_offload._common.offload_plan import OffloadPlan
from pp_offload.cli.trace import timeline_of
from pp_offload.cli.wrong import told, wrong
from pp_offload.errors import ConfigError
from pp_offload.trace import compare_with_plan


def compare(
    plan: Annotated[Path, typer.Argument(help="As pp-offload plan has written it: plan.json.")],
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...", help="Written by a Trace of a run by it; one for each rank, or all."
        ),
    ],
    step: Annotated[
        int | None, typer.Option(help="The last one of the trace if not given.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print figures in JSON instead of a table.")
    ] = False,
) -> None:
    """A plan beside what a run by it did.

    A row for each rank, and below it what is worse than planned by more than 2 %, with the input of
    the plan that was wrong.

    The exit code is 0 where nothing is worse; 1 where something is, or the plan is of another
    model, schedule or number of microbatches.
    """
    with told("PLAN", ConfigError, OSError):
        planned = OffloadPlan.load(plan)
    timeline = timeline_of("FILE", *files)
    try:
        found = compare_with_plan(planned, timeline, step=step)
    except ConfigError as failure:
        raise wrong("PLAN", str(failure)) from failure
    except ValueError as failure:
        raise wrong("--step", str(failure)) from failure
    if as_json:
        typer.echo(json.dumps(found.figures(), indent=2))
    else:
        typer.echo(f"{planned.made_for}\n")
        typer.echo(found.table())
    if not found.is_as_planned:
        raise typer.Exit(1)
