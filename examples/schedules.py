"""The schedules of ``torch.distributed.pipelining``, by name, and which stages a rank has."""

from __future__ import annotations

import argparse
from typing import Any

from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from pp_offload.simulate.schedules import LOOPED, ONE_STAGE, SCHEDULES, V_SHAPED, checked_stages

__all__ = ["LOOPED", "ONE_STAGE", "SCHEDULES", "V_SHAPED"]


def check_schedule(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Fill in how many virtual stages the schedule takes, or say what is wrong."""
    try:
        options.virtual_stages = checked_stages(options.schedule, options.virtual_stages)
    except ValueError as failure:
        parser.error(f"--schedule {failure}")


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
