"""Below a limit as much stays as has room, without groups to mark."""

from __future__ import annotations

import logging

import pytest
import torch
from conftest import make_backend
from helpers.checkpointed import make, results
from helpers.sliced import Call, Order, last_in_first_out, one_by_one
from helpers.toy import same_bits
from helpers.virtual_layers import ROWS, SAVED_BYTES, WIDTH, Layers, hardware
from torch import Tensor

from pp_offload import OffloadConfig
from pp_offload._activations.context import OffloadActivations
from pp_offload.simulate import VirtualBackend

NUM_LAYERS = 24


def one_ahead(call: Call, leaves: list[Tensor]) -> list[Tensor]:
    """As in a pipeline: a step is over where no graph is left."""
    losses = [call(leaves[0]).square().mean()]
    for x in leaves[1:]:
        losses.append(call(x).square().mean())
        losses[-2].backward()
    losses[-1].backward()
    return losses


@pytest.mark.parametrize("program", [one_by_one, last_in_first_out, one_ahead])
@pytest.mark.parametrize("limit_bytes", [1, 3000, 2**30])
@pytest.mark.parametrize("order", ["late", "eager", "random"])
def test_equal_bit_for_bit(order: str, limit_bytes: int, program: Order) -> None:
    """In steps that differ in how many microbatches there are."""
    backend = make_backend(order)
    offload = OffloadActivations(
        min_offload_size=1,
        max_fwd_stash_size=2,
        config=OffloadConfig(device_limit_bytes=limit_bytes),
        backend=backend,
    )
    plain, model = (make(backend.device, None, backend)[0] for _ in range(2))
    sent = []
    for number, num in enumerate([2] * 7 + [3, 3, 1, 1]):
        before = offload.statistics().bytes_offloaded
        expected = results(plain, program, number, backend.device, num=num)
        got = results(model, program, number, backend.device, context=offload, num=num)
        assert same_bits(got, expected)
        sent.append(offload.statistics().bytes_offloaded - before)
    assert sent[0]
    assert bool(sent[6]) == (limit_bytes < 2**30)


@pytest.mark.parametrize(("num_saved", "least", "most"), [(1, 0.9, 1), (20, 0.3, 0.7), (60, 0, 0)])
def test_the_limit_is_kept_and_filled(
    num_saved: int, least: float, most: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Of what all layers save as much leaves as must; and the log says so once."""
    caplog.set_level(logging.INFO)
    limit_bytes = int(num_saved * SAVED_BYTES) + NUM_LAYERS * WIDTH**2 * 4
    backend = VirtualBackend(hardware(1.0))
    offload = OffloadActivations(
        max_fwd_stash_size=1,
        config=OffloadConfig(
            device_limit_bytes=limit_bytes,
            max_in_flight_bytes=SAVED_BYTES,
            prefetch_bytes=SAVED_BYTES,
        ),
        backend=backend,
    )
    with backend.activate():
        model = Layers(NUM_LAYERS, WIDTH)
        offload.keep_module(model)
        sent, peaks = [], []
        for _ in range(10):
            before = offload.statistics().bytes_offloaded
            backend.memory.take_peak()
            x = torch.empty(ROWS, WIDTH, device="meta", dtype=torch.bfloat16, requires_grad=True)
            with offload:
                y = model(x, offload=False)
            y.backward(torch.empty_like(y))
            del x, y
            backend.synchronize()  # as reading a loss does
            peaks.append(backend.memory.peak_bytes)
            sent.append(offload.statistics().bytes_offloaded - before)
    assert least <= sent[-1] / sent[0] <= most
    assert num_saved == 1 or max(peaks) <= limit_bytes
    (line,) = [text for text in caplog.messages if "saved tensors stay" in text]
    assert f"{sent[-1] / 2**30:.2f} are on the host" in line
    assert f"of at most {limit_bytes / 2**30:.2f}" in line
    assert "a step takes" in line and "without waiting for copies (estimated)" in line
