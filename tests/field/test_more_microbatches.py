"""F21: more microbatches than the first step had are offloaded all the same."""

from __future__ import annotations

import logging

import pytest
from conftest import BACKENDS, make_backend
from field_checks import Chain, make_inputs, run_moves, schedule
from toy import assert_idle, same_bits

from pp_offload import OffloadConfig, PipelineOffloadManager, use_backend

pytestmark = pytest.mark.field("F21")

LAYERS = 3
COUNTS = (2, 6, 3, 8, 8)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize(("ahead", "vp_size"), [(1, 1), (2, 1), (4, 1), (3, 2)])
def test_number_of_microbatches_changes(
    kind: str, ahead: int, vp_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="pp_offload")
    with use_backend(
        make_backend(kind),
        config=OffloadConfig(device_limit_bytes=None, min_offloaded_tensor_size=1),
    ) as manager:
        device = manager.backend.device
        on, off = (
            [Chain(("a", "b"), LAYERS, is_on=b, device=device, seed=s) for s in range(vp_size)]
            for b in (True, False)
        )
        moved, before = [], 0
        for step, count in enumerate(COUNTS):
            moves = schedule(count, ahead, vp_size, 2 if vp_size > 1 else 1)
            inputs = make_inputs(count, step=step, device=device)
            expected = run_moves(off, inputs, moves, False)
            assert same_bits(run_moves(on, inputs, moves, True), expected), step
            assert_idle(manager)
            now = manager.statistics().bytes_offloaded
            moved.append(now - before)
            before = now
        manager.reset()
    per_microbatch = moved[0] / COUNTS[0]
    for count, nbytes in zip(COUNTS, moved, strict=True):
        # At most the last layer of a microbatch stays, if its backward is next.
        assert nbytes >= count * per_microbatch * (LAYERS - 1) / LAYERS
        assert nbytes <= count * per_microbatch
    changes = [r for r in caplog.records if "the step changed" in r.getMessage()]
    assert len(changes) == 3


def test_more_groups_than_the_last_step_had(manager: PipelineOffloadManager) -> None:
    device = manager.backend.device
    moved = []
    for layers in (1, 4):
        model = Chain(("a",), layers, device=device)
        for _ in range(2 if layers == 1 else 1):
            before = manager.statistics().bytes_offloaded
            run_moves([model], make_inputs(1, device=device), schedule(1, 1), True)
            moved.append(manager.statistics().bytes_offloaded - before)
            assert_idle(manager)
    assert moved[0] > 0
    # Of four layers at most two may stay: the one the plan keeps, and the last one.
    assert moved[-1] >= 2 * moved[0]
