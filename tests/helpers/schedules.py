"""Schedules of ``torch.distributed.pipelining``, each with how many stages a rank has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pp_offload.simulate import PipelineOrder

ONE_STAGE = [("gpipe", 1), ("1f1b", 1)]

SEVERAL = [
    (name, virtual)
    for name in ("interleaved1f1b", "loopedbfs", "interleavedzerobubble")
    for virtual in (1, 2, 3)
]

V_SHAPED = [("zbv", 2), ("dualpipev", 2)]

ALL = [*ONE_STAGE, *SEVERAL, *V_SHAPED, ("csv", 2)]


def order(schedule: Any, num_ranks: int, num_stages: int, num_microbatches: int) -> PipelineOrder:
    from pp_offload.simulate import PipelineOrder  # late: the smoke suite needs torch alone

    return PipelineOrder(
        schedule, num_ranks=num_ranks, num_stages=num_stages, num_microbatches=num_microbatches
    )
