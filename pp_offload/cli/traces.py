"""Commands about traces: figures or a picture of a step, and a plan beside it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pp_offload._common.offload_plan import OffloadPlan
from pp_offload._common.text import GB, format_table, size_cell
from pp_offload.cli.arguments import check_target, errors_of, report, wrong
from pp_offload.errors import ConfigError
from pp_offload.trace import Timeline, compare_with_plan, read
from pp_offload.trace.figures import WAITS, Kind, RankStep, numbers_of_steps, rank_steps
from pp_offload.trace.timeline import COUNTERS

MS = 1e-3
DISK = Kind.WRITE, Kind.READ

HEAD = "rank,step ms,busy,for reload,offload,disk,others,off GB/s,back GB/s".split(",")

NOTE = """\
for reload, offload, disk, others: ms in which compute waited for that; others are other ranks above
all. GB/s: while copies ran. Peaks: GiB. - is what the trace does not say."""


def trace(given: Namespace) -> int:
    """Print or draw a step of a trace."""
    timeline = _read(given.files)
    with errors_of("--step"):
        steps = rank_steps(timeline, given.step)
    ranks = list(steps)
    step = steps[ranks[0]].facts["step"]
    for rank in given.rank or ():
        if rank not in ranks:
            problem = f"found {rank}, expected one that has step {step}: {ranks}"
            raise wrong("--rank", problem)
    ranks = list(dict.fromkeys(given.rank or ranks))
    shown = [steps[rank] for rank in ranks]
    if given.png is None:
        text = _table(timeline, step, shown)
    else:
        text = _draw(given.png, timeline, step, ranks)
    plain = {"step": step, "ranks": [rank.as_dict() for rank in shown]}
    report(text, plain, as_json=given.json)
    return 0


def compare(given: Namespace) -> int:
    """Print a plan beside a run by it."""
    with errors_of("PLAN", ConfigError, OSError):
        plan = OffloadPlan.load(given.planned)
    timeline = _read(given.files)
    with errors_of("PLAN or --step"):
        both = compare_with_plan(plan, timeline, step=given.step)
    report(f"{plan.made_for}\n\n{both.table()}", both.figures(), as_json=given.json)
    return int(not both.is_as_planned)


def _read(paths: Sequence[Path]) -> Timeline:
    with errors_of("FILE", OSError):
        return read(*paths)


def _draw(png: Path, timeline: Timeline, step: int, ranks: list[int]) -> str:
    from pp_offload.trace.picture import draw

    check_target("--png", png)
    with errors_of("--png", ImportError, OSError):
        draw(timeline, png, ranks=ranks, step=step)
    return f"step {step} of ranks {', '.join(map(str, ranks))} is in {png}"


def _table(timeline: Timeline, step: int, ranks: Sequence[RankStep]) -> str:
    counters = [name for name in COUNTERS if any(name in rank.peak_bytes for rank in ranks)]
    has_disk = any(rank.times[kind] for rank in ranks for kind in DISK)
    disk_head = ["written GiB", "read GiB"] if has_disk else []
    rows = [[*HEAD, *disk_head, *(f"peak {name}" for name in counters)]]
    for rank in ranks:
        times = [rank.end_s - rank.begin_s, rank.seconds_of(Kind.OPERATORS) or None]
        times += [rank.waited_s[kind] for kind in WAITS]
        rates = [rank.copied(kind)[1] for kind in (Kind.OFFLOAD, Kind.RELOAD)]
        sizes: list[Any] = [rank.copied(kind)[0] for kind in DISK] if has_disk else []
        sizes += [rank.peak_bytes.get(name) for name in counters]
        cells = [_number(x, unit) for row, unit in ((times, MS), (rates, GB)) for x in row]
        cells += ["-" if nbytes is None else size_cell(nbytes, digits=3) for nbytes in sizes]
        rows.append([str(rank.rank), *cells])
    first, *later_steps = numbers_of_steps(timeline)
    numbers = f"steps {first} to {later_steps[-1]}" if later_steps else f"step {first}"
    lines = [f"step {step}; the trace has {numbers}", "", format_table(rows), NOTE]
    cut = [str(r.rank) for r in ranks if timeline.metadata[r.rank].get("has_captures")]
    if cut:
        lines.append(f"ranks {', '.join(cut)}: work of captured CUDA graphs is missing")
    return "\n".join(lines)


def _number(value: float | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:.1f}"
