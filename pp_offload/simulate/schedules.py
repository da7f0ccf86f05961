"""Schedules of ``torch.distributed.pipelining`` by name, and the stages of a rank.

num = checked_stages("zbv", None)          # 2: what the schedule takes
order = order_of("zbv", num_ranks=4, stages_per_rank=num, num_microbatches=16)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from pp_offload._common.checks import near
from pp_offload.simulate.orders import PipelineOrder

ONE_STAGE: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
LOOPED: dict[str, Any] = {
    "interleaved1f1b": ScheduleInterleaved1F1B,
    "loopedbfs": ScheduleLoopedBFS,
    "interleavedzerobubble": ScheduleInterleavedZeroBubble,
}
V_SHAPED: dict[str, Any] = {"zbv": ScheduleZBVZeroBubble, "dualpipev": ScheduleDualPipeV}
SCHEDULES = ONE_STAGE | LOOPED | V_SHAPED


def checked_stages(schedule: str, stages_per_rank: int | None) -> int:
    """Check and return the number of stages of a rank.

    Args:
        schedule: A name of :data:`SCHEDULES`, or the path of a CSV file.
        stages_per_rank: As given; None for the least that the schedule takes.

    Raises:
        ValueError: There is no such schedule, or it takes another number.
    """
    if schedule not in SCHEDULES and not Path(schedule).is_file():
        raise ValueError(
            f"{schedule} is none of {', '.join(SCHEDULES)}, and not a file"
            f"{near(schedule, list(SCHEDULES))}"
        )
    if stages_per_rank is None:
        return 2 if schedule in LOOPED | V_SHAPED else 1
    if schedule in ONE_STAGE and stages_per_rank != 1:
        raise ValueError(f"{schedule} takes --virtual-stages 1; try interleaved1f1b")
    if schedule in V_SHAPED and stages_per_rank != 2:
        raise ValueError(f"{schedule} takes --virtual-stages 2")
    return stages_per_rank


def order_of(
    schedule: str, *, num_ranks: int, stages_per_rank: int, num_microbatches: int
) -> PipelineOrder:
    """Make the order of a schedule by name.

    Raises:
        ValueError: The schedule is not for so many.
    """
    return PipelineOrder(
        SCHEDULES.get(schedule, schedule),
        num_ranks=num_ranks,
        num_stages=num_ranks * stages_per_rank,
        num_microbatches=num_microbatches,
    )
