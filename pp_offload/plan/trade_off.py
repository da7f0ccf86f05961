"""Time against memory: plans for limits from the least to the most.

    plans = front(chooser, num=8)
    print(front_table(plans))

A front also has two ways without a plan: all groups stay, or all layers are recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pp_offload._common.checks import check_count
from pp_offload._common.offload_plan import OffloadPlan
from pp_offload.plan.chooser import Chooser
from pp_offload.simulate.rank import PipelineStep


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
