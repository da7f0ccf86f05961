"""Below a limit as much stays as has room, without groups to mark."""

from __future__ import annotations

import logging

import pytest
import torch
from conftest import make_backend
from helpers.backward_orders import Program, last_in_first_out, one_by_one
from helpers.toy import batches, make_model, same_bits
from helpers.virtual_layers import ROWS, SAVED_BYTES, WIDTH, Layers, hardware

from pp_offload import OffloadConfig
from pp_offload._activations.context import OffloadActivations
from pp_offload.simulate import VirtualBackend

NUM_LAYERS = 24


@pytest.mark.parametrize("program", [one_by_one, last_in_first_out])
@pytest.mark.parametrize("limit_bytes", [1, 3000, 2**30])
@pytest.mark.parametrize("order", ["late", "eager", "random"])
def test_equal_bit_for_bit(order: str, limit_bytes: int, program: Program) -> None:
    """In steps that differ in how many microbatches there are."""
    backend = make_backend(order)
    offload = OffloadActivations(
        min_offload_size=1,
        max_fwd_stash_size=2,
        config=OffloadConfig(device_limit_bytes=limit_bytes),
        backend=backend,
    )
    models = [make_model(groups=()) for _ in range(2)]
    sent = []
    for number, num in enumerate([2] * 7 + [3, 3, 1, 1]):
        before = offload.statistics().bytes_offloaded
        got, expected = (
            program(model, [x.requires_grad_() for x in batches(num, step=number)], context)
            for model, context in zip(models, (offload, None), strict=True)
        )
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


def test_with_a_backward_after_each_forward_but_one() -> None:
    """As in a pipeline: a step is over where no graph is left."""
    backend = make_backend("eager")
    config = OffloadConfig(device_limit_bytes=2**30)
    offload = OffloadActivations(min_offload_size=1, config=config, backend=backend)
    model, sent = make_model(groups=()), []
    for number in range(4):
        before, waiting = offload.statistics().bytes_offloaded, []
        for x in batches(4, step=number):
            with offload:
                waiting.append(model(x).square().mean())
            if len(waiting) > 1:
                waiting.pop(0).backward()
        waiting.pop().backward()
        sent.append(offload.statistics().bytes_offloaded - before)
    assert sent[0] and not sent[-1]
