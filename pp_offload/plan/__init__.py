"""Prediction of a step's cost: the engine itself, on tensors that are only their bytes::

    tapes = record(order, work, DEVICES["H100"])        # one microbatch, on a virtual device
    print(profile_table(profile(tapes, DEVICES["H100"])))
    step = predict(order, tapes, DEVICES["H100"], config=OffloadConfig())
    step.seconds, step.ranks[0].peak_bytes
    plan = choose(order, tapes, DEVICES["H100"], 40 * 2**30)            # groups that leave, by rank
    attach(schedule, groups, OffloadConfig(plan=plan))

A run of the whole program on :mod:`pp_offload.simulate` has the same result, and takes longer.
"""

from __future__ import annotations

from pp_offload._common.offload_plan import OffloadPlan, PlannedGroup, RankPlan
from pp_offload.plan.chooser import Chooser, Front, InfeasibleError, choose, front
from pp_offload.plan.pipeline import predict
from pp_offload.plan.profile import ActionProfile, GroupProfile, Profile, StageProfile, profile
from pp_offload.plan.record import record
from pp_offload.plan.table import front_table, profile_table
from pp_offload.plan.tape import RankTapes, Tape

__all__ = [
    "ActionProfile",
    "Chooser",
    "Front",
    "GroupProfile",
    "InfeasibleError",
    "OffloadPlan",
    "PlannedGroup",
    "Profile",
    "RankPlan",
    "RankTapes",
    "StageProfile",
    "Tape",
    "choose",
    "front",
    "front_table",
    "predict",
    "profile",
    "profile_table",
    "record",
]
