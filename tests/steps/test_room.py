"""A limit on devices that say what is allocated: bits, one rank's steps, and two stages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import make_backend
from helpers.toy import batches, make_model, run_step, same_bits

from pp_offload import OffloadConfig, PipelineOffloadManager, use_backend
from pp_offload.testing import SimulatedBackend

ORDERS = ["late", "random"]


@pytest.fixture(params=[0, 4000, 2**30])
def limit_bytes(request: pytest.FixtureRequest) -> int:
    """From what nothing has room below to what all has."""
    return int(request.param)


@pytest.fixture
def manager(limit_bytes: int, backend_name: str) -> Iterator[PipelineOffloadManager]:
    config = OffloadConfig(
        device_limit_bytes=limit_bytes,
        min_offloaded_tensor_size=1,
        max_in_flight_bytes=200,
        prefetch_bytes=200,
    )
    with use_backend(make_backend(backend_name), config=config) as fresh:
        yield fresh


@pytest.mark.parametrize("backend_name", ORDERS)
def test_losses_and_gradients_are_those_without(
    manager: PipelineOffloadManager, limit_bytes: int
) -> None:
    """In steps that differ in how many microbatches there are, and how long these are."""
    backend, sent = manager.backend, []
    assert isinstance(backend, SimulatedBackend)
    for number, (num, in_flight, length) in enumerate(
        [(4, 2, 5)] * 5 + [(6, 3, 5), (4, 2, 9), (4, 2, 5), (2, 1, 3)] + [(6, 3, 9)] * 4
    ):
        inputs = batches(num, step=number, length=length)
        expected = run_step(make_model(groups=()), inputs, in_flight=in_flight, offload=False)
        before = manager.statistics().bytes_offloaded
        tensors = run_step(make_model(), inputs, in_flight=in_flight)
        assert same_bits(tensors, expected)
        sent.append(manager.statistics().bytes_offloaded - before)
    backend.check()
    if limit_bytes == 4000:
        assert 0 < sent[4] < sent[0], "some stay, and some leave"
    if limit_bytes == 2**30:
        assert sent[0] > 0 and sent[4] == 0 and sent[5] > 0 and sent[-1] == 0
    elif limit_bytes == 0:
        assert all(sent)
