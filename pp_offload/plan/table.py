"""Plans, fronts and profiles as text: tables with notes below; and a front as a picture.

print(table(plan, chooser.without_offload()))
print(front_table(front(chooser)))
draw_front(front(chooser), "front.png", title="Llama 8B on 4 H100")  # needs matplotlib
print(profile_table(profile(tapes, hardware)))
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

from pp_offload._common import pictures as art
from pp_offload._common.offload_plan import OffloadPlan, RankPlan
from pp_offload._common.text import GIB, MIB, format_table, size_cell, size_text
from pp_offload.plan.chooser import Front
from pp_offload.plan.pipeline import peak_of
from pp_offload.plan.profile import GroupProfile, Profile, StageProfile
from pp_offload.plan.record import neighbours
from pp_offload.simulate.pipeline import PipelineStep, RankStep

LONG = 0.1  # part of a step that compute must wait for copies for advice to be given

HEAD = ("rank", "peak GiB", "with", "host GiB", "stalled ms", "leave", "stay", "recompute")

NOTE = """\
The first peak is that without offload, all else is with it. stalled: ms of a step in which compute
stands still for copies. recompute: layers that backward computes anew; only groups of the others
leave or stay. From the second step on, the last group of each name in the chunk whose backward is
first stays, too: it could not be back in time."""

FRONT_HEAD = ("", "limit GiB", "peak GiB", "step ms", "longer", "host GiB", "recompute")

FRONT_NOTE = """\
peak, host: of the fullest rank. longer: than without offload, which no plan is below. recompute:
layers of all ranks that backward computes anew."""

GROUPS = ("group", "stages", "num", "MiB", "forward ms", "backward ms", "copy ms", "MiB/ms")

GROUPS_NOTE = """\
Of one microbatch, a row for all groups that are alike. MiB/ms: what a group may send for each
millisecond of its forward. The link carries {link:.1f}: a group below that leaves in less time than
its forward takes."""

STAGES = (
    *("stage", "rank", "holds GiB", "saves GiB", "forward peak", "backward peak"),
    *("forward ms", "backward ms", "recompute ms", "frees GiB"),
)

STAGES_NOTE = """\
holds: parameters and buffers of messages, at the begin of a step. saves: what a microbatch holds
from its forward to its backward if nothing leaves. peaks: the most that the device holds more while
it runs, the backward's with the gradients that it makes. recompute: of each layer that backward
computes anew, and how much less a microbatch holds for it."""

OPTIMIZERS = ("rank", "optimizer's state GiB", "peak", "ms")

OPTIMIZERS_NOTE = "Of the end of each step; the state is there from that of the first one on."


# Plans


def table(plan: OffloadPlan, without: PipelineStep, roomier: OffloadPlan | None = None) -> str:
    """Format a row for each rank, and below whether host memory or the link binds. ``roomier`` is
    the plan of :meth:`Chooser.with_more_on_the_host`.
    """
    both = zip(plan.ranks, without.ranks, strict=True)
    rows = [_rank(number, *pair) for number, pair in enumerate(both)]
    state = "without an optimizer's state"
    if most := max((rank.optimizer_bytes for rank in plan.ranks), default=0):
        state = f"with the optimizer's state, at most {size_text(most)} on a rank"
    lines = [_headline(plan), "", format_table([HEAD, *rows]), NOTE, f"Peaks are {state}."]
    if roomier is not None:
        host = max(rank.host_peak_bytes for rank in roomier.ranks)
        lines.append(
            f"\nHost memory is what binds: with {size_text(host)} of it on a rank a step takes "
            f"{roomier.seconds * 1e3:.1f} ms,\n{1 - roomier.seconds / plan.seconds:.1%} less."
        )
    if max((rank.stalled_s for rank in plan.ranks), default=0.0) > LONG * plan.seconds:
        sweep = "`pp-offload sweep` shows what a larger limit saves"
        layers = ";\nlayers that may be recomputed, Modules(layers=...), leave copies more time"
        more = "" if num_recomputed(*plan.ranks) else layers
        lines.append(f"\nCopies have too much to do: {sweep}{more}.")
    return "\n".join(lines)


def _headline(plan: OffloadPlan) -> str:
    """Compare the time of a step with that without offload."""
    limit, ms = size_text(plan.limit_bytes), f"{plan.seconds * 1e3:.1f} ms"
    groups = [group for rank in plan.ranks for stage in rank.stages for group in stage]
    if not num_recomputed(*plan.ranks) and all(each.keeps for each in groups if each.nbytes):
        return f"Everything fits in {limit}: no group needs to leave, and a step takes {ms}."
    least = f"the {plan.least_seconds * 1e3:.1f} without offload"
    slower = plan.seconds / plan.least_seconds - 1 if plan.least_seconds else 0.0
    beside = (
        f"as long as {least}, and no plan is faster"
        if slower < 1e-6
        else f"{slower:.1%} more than {least}, which no plan is below; that none is between the "
        "two is not proven"
    )
    return f"at most {limit}: {ms} a step, {beside}"


def _rank(number: int, planned: RankPlan, without: RankStep) -> tuple[str, ...]:
    num = num_recomputed(planned)
    sizes = without.peak_bytes, planned.peak_bytes, planned.host_peak_bytes
    return (
        *(str(number), *map(size_cell, sizes)),
        f"{planned.stalled_s * 1e3:.1f}",
        *(_named(planned, keeps=keeps) for keeps in (False, True)),
        f"{num} layer{'s' * (num > 1)}" if num else "-",
    )


def num_recomputed(*ranks: RankPlan) -> int:
    """Number of layers that backward recomputes on these ranks."""
    return sum(len(names) for rank in ranks for names in rank.recomputed)


def _named(rank: RankPlan, *, keeps: bool) -> str:
    groups = [group for stage in rank.stages for group in stage]
    names = Counter(group.name for group in groups if group.keeps is keeps and group.nbytes)
    return ", ".join(f"{num} {name}" for name, num in names.items()) or "-"


# Fronts


def front_table(front: Front) -> str:
    """Format a row for each plan, and for the steps without a plan."""
    without, rows = front.without_offload, [FRONT_HEAD]
    for number, plan in enumerate(front.plans):
        limit = size_cell(plan.limit_bytes, is_least=True)
        host = size_cell(max(rank.host_peak_bytes for rank in plan.ranks))
        recomputed = str(num_recomputed(*plan.ranks) or "-")
        rows.append((f"plan {number}", limit, *_costs(plan, without), host, recomputed))
    if front.recomputed is not None:
        rows.append(("all recomputed", "-", *_costs(front.recomputed, without), "-", "all"))
    rows.append(("without offload", "-", *_costs(without, without), "-", "-"))
    return "\n".join([format_table(rows), FRONT_NOTE])


def _costs(step: PipelineStep | OffloadPlan, without: PipelineStep) -> tuple[str, str, str]:
    """Return the peak, the time, and how much longer that is than without offload."""
    part = round(step.seconds / without.seconds - 1, 3) if without.seconds else None
    longer = "-" if part is None else f"{part or 0:.1%}"  # not -0.0%
    return size_cell(peak_of(step)), f"{step.seconds * 1e3:.1f}", longer


# Profiles


def profile_table(profile: Profile) -> str:
    """Format a row for each kind of group, for each stage, and for each optimizer."""
    alike: dict[GroupProfile, list[GroupProfile]] = {}
    for group in profile.groups:
        # Whole nanoseconds: times of equal operators differ by the rounding of the clock.
        ms = {name: round(getattr(group, name), 6) for name in ("forward_ms", "backward_ms")}
        alike.setdefault(replace(group, layer=0, stage=0, **ms), []).append(group)
    lines = [
        format_table([GROUPS, *map(_group, alike.values())]),
        GROUPS_NOTE.format(link=profile.link_bytes_per_ms / MIB),
        "",
        format_table([STAGES, *(_stage(each, profile.resident_bytes) for each in profile.stages)]),
        STAGES_NOTE,
    ]
    optimizers = [OPTIMIZERS]
    for rank, each in enumerate(profile.optimizers):
        if each is not None:
            sizes = size_cell(each.resident_bytes), size_cell(each.transient_peak_bytes)
            optimizers.append((str(rank), *sizes, f"{each.ms:.2f}"))
    if len(optimizers) > 1:
        lines += ["", format_table(optimizers), OPTIMIZERS_NOTE]
    return "\n".join(lines)


def _group(groups: Sequence[GroupProfile]) -> tuple[str, ...]:
    """Make the row of groups that are alike."""
    group, runs = groups[0], neighbours(sorted({each.stage for each in groups}))
    stages = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return (
        group.name,
        ", ".join(stages),
        str(len(groups)),
        size_cell(group.nbytes, "MiB", 1),
        *(f"{ms:.2f}" for ms in (group.forward_ms, group.backward_ms, group.copy_ms)),
        f"{group.bytes_per_ms / MIB:.1f}",
    )


def _stage(stage: StageProfile, resident_bytes: Sequence[int]) -> tuple[str, ...]:
    forward, first = stage.forward, stage.first_backward
    peaks = forward.transient_peak_bytes, first.transient_peak_bytes
    return (
        *(str(stage.stage), str(stage.rank)),
        *map(size_cell, (resident_bytes[stage.rank], forward.resident_bytes, *peaks)),
        *(f"{ms:.2f}" for ms in (forward.ms, stage.backward.ms)),
        "-" if stage.recompute_ms is None else f"{stage.recompute_ms:.2f}",
        "-" if stage.recompute_frees_bytes is None else size_cell(int(stage.recompute_frees_bytes)),
    )


def draw_front(front: Front, path: str | os.PathLike[str], *, title: str = "") -> None:
    """Draw the time of a step against the limit, in the format that the file's suffix names.

    Raises:
        ImportError: Matplotlib is not installed.
        OSError: The file cannot be written.
        ValueError: The suffix names no format of pictures.
    """
    art.check_format(path)
    without = front.without_offload
    figure = art.new_figure(height_inches=4.0, layout="constrained")
    axes = figure.add_subplot()

    def draw(label: str, points: Sequence[tuple[float, float]], marker: str, **style: Any) -> None:
        gib, ms = [nbytes / GIB for nbytes, _ in points], [seconds * 1e3 for _, seconds in points]
        axes.plot(gib, ms, marker, label=label, **style)

    by_limit = [(plan.limit_bytes, plan.seconds) for plan in front.plans]
    recomputed = [*compress(by_limit, [num_recomputed(*plan.ranks) for plan in front.plans])]
    draw("by a plan", by_limit, "o-", color=art.OFFLOAD, markersize=4)
    if recomputed:
        circles = {"color": art.RECOMPUTE, "markersize": 8, "markerfacecolor": "none"}
        draw("with layers recomputed", recomputed, "o", **circles)
    draw("without offload", [(peak_of(without), without.seconds)], "s", color=art.DEVICE)
    if (every := front.recomputed) is not None:
        label = "all layers recomputed, nothing leaves"
        draw(label, [(peak_of(every), every.seconds)], "D", color=art.RECOMPUTE)
    axes.axhline(without.seconds * 1e3, color=art.DEVICE, linewidth=0.6, linestyle="--")
    axes.axvspan(0, by_limit[0][0] / GIB, color=art.FAINT, label="no plan was found")
    axes.set_xlim(left=0)
    axes.set_xlabel("limit of each device, GiB")
    axes.set_ylabel("step, ms")
    axes.grid(color=art.FAINT, linewidth=0.6)
    axes.legend(**art.LEGEND_ABOVE)
    figure.suptitle(title, fontsize=9, x=0.01, ha="left", wrap=True)
    art.save(figure, path)
