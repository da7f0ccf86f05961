"""The schedules of ``torch.distributed.pipelining``, by name, and which stages a rank has."""

from __future__ import annotations

import argparse
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
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

ONE_STAGE: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
LOOPED: dict[str, Any] = {
    "interleaved1f1b": ScheduleInterleaved1F1B,
    "loopedbfs": ScheduleLoopedBFS,
    "interleavedzerobubble": ScheduleInterleavedZeroBubble,
}
V_SHAPED: dict[str, Any] = {"zbv": ScheduleZBVZeroBubble, "dualpipev": ScheduleDualPipeV}
SCHEDULES = ONE_STAGE | LOOPED | V_SHAPED


def check_schedule(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Fill in how many virtual stages the schedule takes, or say what is wrong."""
    name = options.schedule
    if name not in SCHEDULES and not Path(name).is_file():
        parser.error(f"--schedule {name} is none of {', '.join(SCHEDULES)}, and not a file")
    if options.virtual_stages is None:
        options.virtual_stages = 2 if name in LOOPED | V_SHAPED else 1
    if name in ONE_STAGE and options.virtual_stages != 1:
        parser.error(f"--schedule {name} takes --virtual-stages 1; try interleaved1f1b")
    if name in V_SHAPED and options.virtual_stages != 2:
        parser.error(f"--schedule {name} takes --virtual-stages 2")


def stage_indices(options: argparse.Namespace, rank: int) -> list[int]:
    """Which stages a rank has; of a V, the first rank has the first and the last."""
    if options.schedule in V_SHAPED:
        return [rank, 2 * options.stages - 1 - rank]
    return list(range(rank, options.stages * options.virtual_stages, options.stages))


def make_schedule(options: argparse.Namespace, stages: list[Any], loss_fn: Any) -> Any:
    """The schedule over this rank's stages."""
    name, num = options.schedule, options.microbatches
    if name in ONE_STAGE:
        return ONE_STAGE[name](stages[0], num, loss_fn=loss_fn)
    if name in SCHEDULES:
        return SCHEDULES[name](stages, num, loss_fn=loss_fn)
    schedule = _PipelineScheduleRuntime(stages, num, loss_fn=loss_fn)
    schedule._load_csv(name)
    return schedule
