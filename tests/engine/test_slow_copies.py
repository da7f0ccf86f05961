"""Copies that begin long after they were queued, on a GPU: the bits are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import make_backend
from helpers.toy import assert_idle, batches, make_model, run_step, same_bits

from pp_offload import OffloadConfig, use_backend
from pp_offload.backends import AcceleratorBackend

CYCLES = 50_000_000
"""Some 30 ms."""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("direction", ["d2h", "h2d"])
def test_equal_bit_for_bit(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = AcceleratorBackend.copy

    def sleep_and_copy(self: AcceleratorBackend, stream: Any, *args: Any) -> None:
        if stream is getattr(self, direction):
            with stream:
                torch.cuda._sleep(CYCLES)
        copy(self, stream, *args)

    monkeypatch.setattr(AcceleratorBackend, "copy", sleep_and_copy)
    config = OffloadConfig(min_offloaded_tensor_size=1)
    with use_backend(make_backend("cuda"), config=config) as manager:
        on, off = (make_model(width=64, groups=g, device="cuda") for g in (("mix", "mlp"), ()))
        for step in range(4):
            inputs = [x.cuda() for x in batches(4, 64, step, length=5 + step)]
            expected = run_step(off, inputs, in_flight=2, offload=False)
            assert same_bits(run_step(on, inputs, in_flight=2), expected), step
        torch.cuda.synchronize()
        assert_idle(manager)
