"""What a step will cost, in numbers alone: the engine's rules, without tensors.

    tapes = record(order, work, DEVICES["H100"])        # one microbatch, on a virtual device
    step = predict(order, tapes, DEVICES["H100"], config=OffloadConfig())
    step.seconds, step.ranks[0].peak_bytes
    plan = choose(order, tapes, DEVICES["H100"], 40 * 2**30)            # what leaves, rank by rank
    attach(schedule, groups, OffloadConfig(plan=plan))

The engine itself, on :mod:`pp_offload.simulate`, says the same, and takes longer.
"""

from __future__ import annotations

from pp_offload._common.offload_plan import OffloadPlan, PlannedGroup, RankPlan
from pp_offload.plan.chooser import Chooser, choose
from pp_offload.plan.pipeline import predict
from pp_offload.plan.record import record
from pp_offload.plan.search import InfeasibleError
from pp_offload.plan.tape import RankTapes, Tape
from pp_offload.plan.trade_off import Front, front

__all__ = [
    "Chooser",
    "Front",
    "InfeasibleError",
    "OffloadPlan",
    "PlannedGroup",
    "RankPlan",
    "RankTapes",
    "Tape",
    "choose",
    "front",
    "predict",
    "record",
]
