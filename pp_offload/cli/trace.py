"""``pp-offload trace``: what happened in a step, as a table or as a picture."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from pp_offload._common.tables import format_table
from pp_offload.cli.wrong import check_target, told, wrong
from pp_offload.trace import Timeline, read
from pp_offload.trace.figures import Kind, RankFigures, checked_step, figures_of, steps_of
from pp_offload.trace.timeline import COUNTERS

GIB, GB = 2**30, 10**9

HEAD = (
    "rank",
    "step ms",
    "busy",
    "for reload",
    "offload",
    "disk",
    "others",
    "off GB/s",
    "back GB/s",
)

NOTE = """\
for reload, offload, disk, others: ms in which compute waited for that; others are other ranks above
all. GB/s: while copies ran. Peaks: GiB. - is what the trace does not say."""


def trace(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...", help="Written by a Trace: out.json.gz, or out.rank*.json.gz."
        ),
    ],
    png: Annotated[
        Path | None, typer.Option(help="Draw the step here instead: PNG, SVG or PDF.")
    ] = None,
    rank: Annotated[
        list[int] | None, typer.Option(help="Of this rank only; may be given again.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="The last one of the trace if not given.")
    ] = None,
    predicted: Annotated[
        Path | None, typer.Option(help="Another trace, drawn dashed over this one; with --png.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print figures in JSON instead of a table.")
    ] = False,
) -> None:
    """What happened in a step, as a table or as a picture."""
    timeline = timeline_of("FILE", *files)
    with told("--step"):
        number = checked_step(timeline, step)
    there = list(steps_of(timeline)[number])
    chosen = rank or there
    missing = [one for one in chosen if one not in there]
    if missing:
        raise wrong("--rank", f"found {missing[0]}, expected one that has step {number}: {there}")
    if png is not None:
        if as_json:
            raise wrong("--json", "a picture has none, expected one of --json and --png")
        _draw(timeline, png, chosen, number, predicted)
        return
    if predicted is not None:
        raise wrong("--predicted", "it is drawn, not printed; add --png out.png")
    if as_json:
        found = [plain(one) for one in figures_of(timeline, number) if one.rank in chosen]
        typer.echo(json.dumps({"step": number, "ranks": found}, indent=2))
        return
    typer.echo(table(timeline, number, chosen))


def timeline_of(option: str, *paths: Path) -> Timeline:
    """Timeline of the files of a run, or an error that names the option."""
    with told(option, OSError):
        return read(*paths)


def _draw(
    timeline: Timeline, png: Path, ranks: list[int], step: int, predicted: Path | None
) -> None:
    from pp_offload.trace.picture import draw

    check_target("--png", png)
    other = None if predicted is None else timeline_of("--predicted", predicted)
    if other is not None:
        with told("--predicted"):
            checked_step(other, None)
    with told("--png", ImportError, OSError):
        draw(timeline, png, ranks=ranks, step=step, predicted=other)
    typer.echo(f"step {step} of ranks {', '.join(map(str, ranks))} is in {png}")


def plain(one: RankFigures) -> dict[str, Any]:
    """The figures of a rank as plain values, in seconds and bytes."""
    waited_s = {kind.value: seconds for kind, seconds in one.waited_s.items()}
    rates = {
        "offload_bytes_per_s": one.offload_bytes_per_s,
        "reload_bytes_per_s": one.reload_bytes_per_s,
    }
    return asdict(one) | rates | {"waited_s": waited_s, "peak_bytes": dict(one.peak_bytes)}


def table(timeline: Timeline, step: int, ranks: list[int]) -> str:
    """The figures of a step, as text."""
    found = [one for one in figures_of(timeline, step) if one.rank in ranks]
    counters = [name for name in COUNTERS if any(name in one.peak_bytes for one in found)]
    has_disk = any(one.written_bytes or one.read_bytes for one in found)
    disk = ("written GiB", "read GiB") if has_disk else ()
    head = HEAD + disk + tuple(f"peak {name}" for name in counters)
    rows = [_row(one, counters, has_disk=has_disk) for one in found]
    first, *others = steps_of(timeline)
    steps = f"steps {first} to {others[-1]}" if others else f"step {first}"
    lines = [f"step {step}; the trace has {steps}", "", format_table([head, *rows]), NOTE]
    return "\n".join([*lines, *_cautions(timeline, ranks)])


def _row(one: RankFigures, counters: list[str], *, has_disk: bool) -> tuple[str, ...]:
    waits = Kind.WAITS_FOR_RELOAD, Kind.WAITS_FOR_OFFLOAD, Kind.WAITS_FOR_DISK, Kind.WAITS_FOR_RANK
    rates = one.offload_bytes_per_s, one.reload_bytes_per_s
    disk = (one.written_bytes, one.read_bytes) if has_disk else ()
    return (
        str(one.rank),
        _number(one.seconds, 1e-3, 1),
        _number(one.busy_s, 1e-3, 1),
        *(_number(one.waited_s[kind], 1e-3, 1) for kind in waits),
        *(_number(rate, GB, 1) for rate in rates),
        *(_number(nbytes, GIB, 3) for nbytes in disk),
        *(_number(one.peak_bytes.get(name), GIB, 3) for name in counters),
    )


def _number(value: float | None, unit: float, digits: int) -> str:
    return "-" if value is None else f"{value / unit:.{digits}f}"


def _cautions(timeline: Timeline, ranks: list[int]) -> list[str]:
    """What makes the figures less than they look."""
    known = {rank: timeline.metadata.get(rank, {}) for rank in ranks}
    said = {
        "is_truncated": "recording stopped early, at max_events: the last step may lack spans",
        "has_captures": "what was captured in a CUDA graph is missing",
        "began_anew": "configure() made another engine, so recording began anew",
    }
    return [
        f"ranks {', '.join(str(rank) for rank in found)}: {text}"
        for key, text in said.items()
        if (found := [rank for rank, one in known.items() if one.get(key)])
    ]
