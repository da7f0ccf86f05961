"""F31: memory follows the largest step, whatever lengths come by; managers share one budget."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from conftest import BACKENDS, make_backend
from toy import assert_idle, make_model, run_step, same_bits

from pp_offload import OffloadConfig, use_backend
from pp_offload._memory.budget import reserved_bytes
from pp_offload._memory.host_pool import HostPool

pytestmark = pytest.mark.field("F31")

WIDTH = 64


@pytest.mark.quick("cpu threads", "late")
@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("num_steps", [40, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_random_lengths_hold_no_more_than_the_largest_step(
    kind: str, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostPool, "min_slab_bytes", 2**16)  # a step has 3 MiB, a payload 150 KiB
    draw = random.Random(0)
    # Or copies of the last step have still to run at its end, and their memory stays.
    config = OffloadConfig(min_offloaded_tensor_size=1, max_in_flight_bytes=0)
    with use_backend(make_backend(kind), config=config) as manager:
        device = str(manager.backend.device)
        model = make_model(2, WIDTH, device=device)
        largest = 0
        for step in range(num_steps):
            lengths = [draw.randrange(200, 600) for _ in range(3)]
            inputs = [torch.randn(length, WIDTH).to(device) for length in lengths]
            run_step(model, inputs, in_flight=3)
            largest = max(largest, manager.statistics().host_bytes_peak)
            manager.backend.synchronize()  # or h2d still reads, and that memory stays
            manager.reset()
            if step:
                # One slab more where no gap was long enough for a payload.
                assert manager.statistics().host_bytes_reserved <= 1.05 * largest + 2**18
        assert_idle(manager)


@pytest.mark.parametrize("kind", BACKENDS)
def test_two_managers_stay_in_one_budget(kind: str) -> None:
    room = 600_000
    gc.collect()
    before = reserved_bytes()
    config = OffloadConfig(min_offloaded_tensor_size=1, host_budget_bytes=before + room)
    plain = make_model(2, WIDTH, groups=())
    with use_backend(make_backend(kind), config=config) as first:
        device = str(first.backend.device)
        plain = plain.to(device)
        model = make_model(2, WIDTH, device=device)
        inputs = [torch.randn(300, WIDTH).to(device) for _ in range(3)]
        expected = run_step(plain, inputs, in_flight=3, offload=False)
        assert same_bits(run_step(model, inputs, in_flight=3), expected)
        with use_backend(make_backend(kind), config=config) as second:
            assert same_bits(run_step(model, inputs, in_flight=3), expected)
            assert reserved_bytes() - before <= room
            held = [one.statistics().host_bytes_reserved for one in (first, second)]
            assert held[1] < held[0] and sum(held) <= room
            assert_idle(second)
        assert same_bits(run_step(model, inputs, in_flight=3), expected)
