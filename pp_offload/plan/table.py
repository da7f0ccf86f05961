"""A plan as text: a table with a row for each rank.

print(table(plan, chooser.without_offload()))
"""

from __future__ import annotations

from collections import Counter

from pp_offload._common.offload_plan import OffloadPlan, RankPlan
from pp_offload._common.sizes import size_cell, size_said
from pp_offload._common.tables import format_table
from pp_offload.simulate.rank import PipelineStep, RankStep

LONG = 0.1
"""Part of a step that compute must wait for copies for advice to be given."""

HEAD = ("rank", "peak GiB", "with", "host GiB", "stalled ms", "leave", "stay", "recompute")

NOTE = """\
The first peak is that without offload, all else is with it. stalled: ms of a step in which compute
stands still for copies. recompute: layers that backward computes anew; only groups of the others
leave or stay. From the second step on, the last group of each name in the chunk whose backward is
first stays, too: it could not be back in time."""


def table(plan: OffloadPlan, none: PipelineStep, roomier: OffloadPlan | None = None) -> str:
    """Format a row for each rank, and below whether host memory or the link binds.

    Args:
        plan: The plan.
        none: The step without offload.
        roomier: Plan of :meth:`Chooser.with_more_on_the_host`.
    """
    rows = [
        _row(number, *both) for number, both in enumerate(zip(plan.ranks, none.ranks, strict=True))
    ]
    return "\n".join(
        [
            _headline(plan),
            "",
            format_table([HEAD, *rows]),
            NOTE,
            *_of_the_optimizer(plan),
            *_because_of_the_host(plan, roomier),
            *_because_of_the_link(plan),
        ]
    )


def _headline(plan: OffloadPlan) -> str:
    """Compare the time of a step with that without offload."""
    limit, ms = size_said(plan.limit_bytes), f"{plan.seconds * 1e3:.1f} ms"
    groups = [group for rank in plan.ranks for stage in rank.stages for group in stage]
    recomputed = any(names for rank in plan.ranks for names in rank.recomputed)
    if not recomputed and all(group.keeps for group in groups if group.nbytes):
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


def _of_the_optimizer(plan: OffloadPlan) -> list[str]:
    """Say whether peaks include the optimizer's state."""
    most = max((rank.optimizer_bytes for rank in plan.ranks), default=0)
    if not most:
        return ["Peaks are without an optimizer's state."]
    return [f"Peaks are with the optimizer's state, at most {size_said(most)} on a rank."]


def _because_of_the_host(plan: OffloadPlan, roomier: OffloadPlan | None) -> list[str]:
    """Return how much shorter a step is with more host memory; empty if it is not."""
    if roomier is None:
        return []
    host = max(rank.host_peak_bytes for rank in roomier.ranks)
    return [
        f"\nHost memory is what binds: with {size_said(host)} of it on a rank a step takes "
        f"{roomier.seconds * 1e3:.1f} ms,\n{1 - roomier.seconds / plan.seconds:.1%} less."
    ]


def _because_of_the_link(plan: OffloadPlan) -> list[str]:
    """Return advice if compute waits long for copies; else empty."""
    stalled_s = max((rank.stalled_s for rank in plan.ranks), default=0.0)
    if stalled_s <= LONG * plan.seconds:
        return []
    advice = "`pp-offload sweep` shows what a larger limit saves"
    if not any(names for rank in plan.ranks for names in rank.recomputed):
        advice += ";\nlayers that may be recomputed, Modules(layers=...), leave copies more time"
    if "disk" in plan.options.get("tiers", ()):
        advice += ";\na disk is far slower than host memory, of which --host-gib is to have enough"
    return [f"\nCopies have too much to do: {advice}."]


def _row(number: int, planned: RankPlan, none: RankStep) -> tuple[str, ...]:
    return (
        str(number),
        size_cell(none.peak_bytes),
        size_cell(planned.peak_bytes),
        size_cell(planned.host_peak_bytes),
        f"{planned.stalled_s * 1e3:.1f}",
        _named(planned, keeps=False),
        _named(planned, keeps=True),
        _num_recomputed(planned),
    )


def _num_recomputed(rank: RankPlan) -> str:
    num = sum(map(len, rank.recomputed))
    return f"{num} layer{'s' * (num > 1)}" if num else "-"


def _named(rank: RankPlan, *, keeps: bool) -> str:
    names = Counter(
        group.name
        for stage in rank.stages
        for group in stage
        if group.keeps is keeps and group.nbytes
    )
    return ", ".join(f"{num} {name}" for name, num in names.items()) or "-"
