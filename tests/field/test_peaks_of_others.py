"""F61: a peak of device memory that no step of the engine has raised changes no plan."""

from __future__ import annotations

import pytest
import torch
from test_auto_plan import Training, training, with_limit

from pp_offload.backends import Allocated

__all__ = ["training"]

pytestmark = pytest.mark.field("F61")


@with_limit(40)
@pytest.mark.parametrize("before_step", [0, 1, 2, 4, 8])
def test_an_allocation_between_steps_takes_no_room_from_them(
    training: Training, before_step: int
) -> None:
    """As by an evaluation, or where a checkpoint is loaded. Nobody resets the device's peak."""
    limit, memory, peak_bytes = training.limit_bytes, training.backend.memory, 0

    def allocated() -> Allocated:
        nonlocal peak_bytes
        peak_bytes = max(peak_bytes, memory.peak_bytes)
        return Allocated(memory.live_bytes, peak_bytes)

    training.backend.allocated = allocated  # type: ignore[method-assign]
    sent = []
    for number in range(9):
        if number == before_step:
            torch.empty(2 * limit, dtype=torch.uint8, device="meta")
            assert allocated().peak_bytes >= 2 * limit
        before = training.sent
        assert training.step() <= limit
        sent.append(training.sent - before)
    assert 0 < sent[-1] < 0.8 * sent[0], "some groups stay"
