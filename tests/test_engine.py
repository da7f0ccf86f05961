"""The whole engine on every backend: same numbers, nothing left behind."""

from __future__ import annotations

import pytest
from helpers.toy import batches, make_model, run_step, same_bits

from pp_offload import PipelineOffloadManager


@pytest.mark.covering(1)
@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_numbers_do_not_change_in_any_step(manager: PipelineOffloadManager, in_flight: int) -> None:
    device = str(manager.backend.device)
    with_offload, without = make_model(device=device), make_model(groups=(), device=device)
    for step in range(4):
        inputs = [x.to(device) for x in batches(4, step=step, length=3 + step)]
        got = run_step(with_offload, inputs, in_flight=in_flight)
        assert same_bits(got, run_step(without, inputs, in_flight=in_flight, offload=False))
    statistics = manager.statistics()
    assert statistics.bytes_offloaded > 0
    assert statistics.host_bytes_in_use == 0
    assert statistics.live_tensors == 0
    assert statistics.bytes_reloaded_unused == 0
