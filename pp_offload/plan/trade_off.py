"""Time against memory: plans for limits from the least to the most.

    plans = front(chooser, num=8)
    print(front_table(plans))

The table also has two ways without a plan: all groups stay, or all layers are recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pp_offload._common.checks import check_count
from pp_offload._common.offload_plan import OffloadPlan
from pp_offload._common.sizes import size_cell
from pp_offload._common.tables import format_table
from pp_offload.plan.chooser import Chooser
from pp_offload.simulate.rank import PipelineStep

GIB = 2**30

HEAD = ("", "limit GiB", "peak GiB", "step ms", "longer", "host GiB", "recompute")

NOTE = """\
peak, host: of the fullest rank. longer: than without offload, which no plan is below. recompute:
layers of all ranks that backward computes anew."""


@dataclass(frozen=True)
class Front:
    """Plans by limit, and two steps without a plan."""

    plans: tuple[OffloadPlan, ...]
    """Least limit first. A larger limit is never slower."""

    without_offload: PipelineStep
    recomputed: PipelineStep | None
    """Step with all layers recomputed and no group offloaded; None without layers."""


def front(chooser: Chooser, *, num: int = 8, made_for: str = "") -> Front:
    """Make plans for limits at equal distances, from the least limit to the most memory.

    Args:
        chooser: Planner of the pipeline.
        num: Number of plans. The least limit can just be met; the last is the peak without
            offload.
        made_for: Model, schedule and device; see :func:`choose`.

    Raises:
        ValueError: ``num`` is below 2, or :func:`choose` raises.
    """
    check_count("num", num, least=2)
    without = chooser.without_offload()
    low, high = chooser.least_limit_bytes, peak_of(without)
    if low >= high:
        limits = [low]  # offload lowers no peak
    else:
        limits = [low + (high - low) * part // (num - 1) for part in range(num)]
    plans = [chooser.plan(limit, made_for=made_for) for limit in limits]
    return Front(tuple(_monotone(plans)), without, chooser.recomputed())


def _monotone(plans: Sequence[OffloadPlan]) -> list[OffloadPlan]:
    """Choose for each limit the fastest of all plans for this limit or a lower one."""
    best: list[OffloadPlan] = []
    for plan in plans:
        is_slower = bool(best) and best[-1].seconds < plan.seconds
        best.append(best[-1].with_limit(plan.limit_bytes) if is_slower else plan)
    return best


def peak_of(step: PipelineStep | OffloadPlan) -> int:
    """Peak of the fullest rank, in bytes."""
    return max(rank.peak_bytes for rank in step.ranks)


def front_table(front: Front) -> str:
    """Format a row for each limit, and for each step without a plan."""
    none = front.without_offload
    rows = [_planned(number, plan, none) for number, plan in enumerate(front.plans)]
    if front.recomputed is not None:
        rows.append(_row("all recomputed", front.recomputed, none, recomputed="all"))
    rows.append(_row("without offload", none, none))
    return "\n".join([format_table([HEAD, *rows]), NOTE])


def _planned(number: int, plan: OffloadPlan, none: PipelineStep) -> tuple[str, ...]:
    num = sum(len(names) for rank in plan.ranks for names in rank.recomputed)
    return _row(
        f"plan {number}",
        plan,
        none,
        limit=size_cell(plan.limit_bytes, is_least=True),
        host=size_cell(max(rank.host_peak_bytes for rank in plan.ranks)),
        recomputed=str(num or "-"),
    )


def _row(
    name: str,
    step: PipelineStep | OffloadPlan,
    none: PipelineStep,
    *,
    limit: str = "-",
    host: str = "-",
    recomputed: str = "-",
) -> tuple[str, ...]:
    step_ms = f"{step.seconds * 1e3:.1f}"
    longer = f"{step.seconds / none.seconds - 1:.1%}" if none.seconds else "-"
    return name, limit, size_cell(peak_of(step)), step_ms, longer, host, recomputed
