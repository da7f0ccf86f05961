"""``pp-offload sweep``: how much longer a step is for less memory, as a table and as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

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
from pp_offload.cli.wrong import check_picture, told
from pp_offload.plan import Front, front
from pp_offload.plan.trade_off import front_table
from pp_offload.simulate.rank import PipelineStep


@on_pipeline
def sweep(
    made: MakePipeline,
    gib: GibOption = None,
    host_gib: HostGibOption = None,
    tiers: TiersOption = "host",
    min_numel: MinNumelOption = MIN_NUMEL,
    network_gb: NetworkOption = 50.0,
    recompute: RecomputeOption = True,
    limits: Annotated[int, typer.Option(min=2, help="For how many limits a plan is made.")] = 8,
    png: Annotated[Path | None, typer.Option(help="Draw it as well: PNG, SVG or PDF.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print figures in JSON instead of a table.")
    ] = False,
) -> None:
    """How much longer a step is for less memory.

    A plan is made for each of some limits, from the least that can be met to what a step needs
    without offload.

    Parameters, gradients and activations count, and with --optimizer its state. No GPU is needed,
    and no time is measured.
    """
    config = config_of(min_numel, gib=gib, host_gib=host_gib, tiers=tiers)
    peers = peers_of(network_gb)
    check_picture("--png", png)
    pipeline = made()
    with chooser_of(pipeline, config, peers, recompute=recompute) as chooser:
        found = front(chooser, num=limits, made_for=pipeline.title)
    if png is not None:
        _draw(found, png, pipeline.title)
    if as_json:
        typer.echo(json.dumps(plain(found), indent=2))
        return
    typer.echo(f"{pipeline.title}\n")
    typer.echo(front_table(found))
    if png is not None:
        typer.echo(f"\nthe picture is in {png}")


def _draw(found: Front, png: Path, title: str) -> None:
    from pp_offload.plan.trade_off_picture import draw_front

    with told("--png", ImportError, OSError):
        draw_front(found, png, title=title)


def plain(found: Front) -> dict[str, Any]:
    """As JSON can hold it, in seconds and bytes."""
    return {
        "plans": [plan.to_dict() for plan in found.plans],
        "without offload": _plain(found.without_offload),
        "all recomputed": None if found.recomputed is None else _plain(found.recomputed),
    }


def _plain(step: PipelineStep) -> dict[str, Any]:
    return {"seconds": step.seconds, "peak_bytes": [rank.peak_bytes for rank in step.ranks]}
