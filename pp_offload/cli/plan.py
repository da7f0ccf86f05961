"""``pp-offload plan``: what each rank keeps, sends away and recomputes, below a limit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pp_offload._common.option_sources import UNITS, parse_limit
from pp_offload._groups.plan_options import OPTIONS
from pp_offload.cli.pipelines import (
    MIN_NUMEL,
    GibOption,
    HostGibOption,
    MakePipeline,
    MinNumelOption,
    NetworkOption,
    RecomputeOption,
    TiersOption,
    chooser_of,
    config_of,
    on_pipeline,
    peers_of,
)
from pp_offload.cli.wrong import check_picture, check_target, told, wrong
from pp_offload.plan import InfeasibleError, OffloadPlan
from pp_offload.plan.table import table
from pp_offload.simulate.rank import PipelineStep


@on_pipeline
def plan(
    made: MakePipeline,
    limit: Annotated[str, typer.Option(help="The most that a device may hold: 70GiB.")],
    gib: GibOption = None,
    host_gib: HostGibOption = None,
    tiers: TiersOption = "host",
    min_numel: MinNumelOption = MIN_NUMEL,
    network_gb: NetworkOption = 50.0,
    recompute: RecomputeOption = True,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan here: plan.json.")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Draw it as well: PNG, SVG or PDF.")] = None,
) -> None:
    """What each rank keeps, sends away and recomputes.

    So that no device holds more than the limit, and a step is as short as was found. The file is
    for OffloadConfig(plan="plan.json").

    Parameters, gradients and activations count, and with --optimizer its state. No GPU is needed,
    and no time is measured.
    """
    config = config_of(min_numel, gib=gib, host_gib=host_gib, tiers=tiers)
    peers = peers_of(network_gb)
    check_target("--output", output)
    check_picture("--png", png)
    limit_bytes = _bytes_of(limit)
    pipeline = made()
    with chooser_of(pipeline, config, peers, recompute=recompute) as chooser:
        try:
            found = chooser.plan(limit_bytes, made_for=pipeline.title)
            roomier = chooser.with_more_on_the_host(found)
        except InfeasibleError as failure:
            more = "" if recompute else "; or leave out --no-recompute"
            raise wrong("--limit", f"{failure}{more}") from failure
    if output is not None:
        found.save(output)
    none = chooser.without_offload()
    typer.echo(f"{pipeline.title}\n")
    typer.echo(table(found, none, roomier))
    if png is not None:
        _draw(found, none, png)
        typer.echo(f"\nthe picture is in {png}")
    if output is not None:
        beside = "".join(f", {name}={value!r}" for name, value in _beside(found))
        typer.echo(f'\nwritten to {output}; follow it with OffloadConfig(plan="{output}"{beside})')
        if any(names for rank in found.ranks for names in rank.recomputed):
            typer.echo(
                "before that, for each stage of a rank: recompute_layers(module, "
                "plan.rank(rank).recomputed[number])"
            )


def _bytes_of(limit: str) -> int:
    """What was typed, in bytes.

    Raises:
        typer.BadParameter: It is no size, or so few bytes that a unit was forgotten.
    """
    nbytes = parse_limit(limit)
    if nbytes is None:
        raise wrong(
            "--limit",
            f"found {limit!r}, expected a number above 0 with a unit of {', '.join(UNITS)}: 70GiB",
        )
    has_unit = not limit.strip()[-1].isdigit()
    if not has_unit and nbytes < UNITS["MiB"]:
        raise wrong(
            "--limit",
            f"found {limit}, which is {nbytes} bytes; expected a size such as {_with_gib(limit)}",
        )
    return nbytes


def _with_gib(limit: str) -> str:
    """What was meant, or another size where that is no number of GiB that a device has."""
    return f"{limit.strip()}GiB" if 0 < float(limit) < 1000 else "70GiB"


def _beside(found: OffloadPlan) -> list[tuple[str, object]]:
    """Options without which the engine would do something else than what was planned."""
    given = [(name, one) for name, one in found.options.items() if name in OPTIONS]
    return [(name, tuple(one) if isinstance(one, list) else one) for name, one in given]


def _draw(found: OffloadPlan, none: PipelineStep, png: Path) -> None:
    from pp_offload.plan.plan_picture import draw_plan

    with told("--png", ImportError, OSError):
        draw_plan(found, none, png)
