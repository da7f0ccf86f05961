"""Groups that are not as planned are told of, with the option that is the cause."""

from __future__ import annotations

import logging

import pytest
from helpers.toy import batches, make_model, run_step

from pp_offload import CpuBackend, OffloadConfig, use_backend
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload._common.offload_plan import OffloadPlan, PlannedGroup, RankPlan


def test_a_run_with_another_smallest_tensor_says_that_it_is_the_cause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rank = RankPlan(((PlannedGroup("mlp", 1, True),),))
    made_with = {"num_microbatches": 8, "min_offloaded_tensor_size": 16}
    plan = OffloadPlan("a test", 0, 0.0, 0.0, (rank,), made_with)
    with (
        caplog.at_level(logging.WARNING),
        use_backend(CpuBackend(), config=OffloadConfig(plan=plan)),
    ):
        for step in range(3):
            run_step(make_model(), batches(2, step=step))
        off_interface.reset()
    (line,) = caplog.messages
    assert "groups of a microbatch do not match the plan of OffloadConfig" in line
    assert "min_offloaded_tensor_size was 16 for the plan, and is 1 here" in line
