"""F32: running out of pinned memory is no device error, and no crash."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import BACKENDS, make_backend
from toy import assert_idle, batches, make_model, run_step, same_bits

from pp_offload import (
    ChunkOffloadHandler,
    OffloadConfig,
    PipelineOffloadManager,
    use_backend,
)

pytestmark = pytest.mark.field("F32")

WIDTH = 48


class Pinned:
    """Memory that can be pinned up to a total, or up to a size per call."""

    def __init__(self, total: int | None, per_call: int | None) -> None:
        self.left = 2**60 if total is None else total
        self.per_call = 2**60 if per_call is None else per_call

    def __call__(self, nbytes: int) -> torch.Tensor:
        if nbytes > self.per_call or nbytes > self.left:
            raise MemoryError(f"cannot pin {nbytes} bytes")
        self.left -= nbytes
        return torch.empty(nbytes, dtype=torch.uint8)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize(
    ("total", "per_call", "warns"),
    [(0, None, True), (200_000, None, True), (None, 2**16, False), (None, 100, True)],
    ids=["none at all", "after some", "in small pieces", "in too small pieces"],
)
def test_ordinary_memory_serves_with_one_warning(
    kind: str,
    total: int | None,
    per_call: int | None,
    warns: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = make_backend(kind)
    backend.allocate_host = Pinned(total, per_call)  # type: ignore[method-assign]
    config = OffloadConfig(min_offloaded_tensor_size=1)
    with (
        caplog.at_level(logging.WARNING, logger="pp_offload"),
        use_backend(backend, config=config) as manager,
    ):
        device = str(backend.device)
        on = make_model(width=WIDTH, device=device)
        off = make_model(width=WIDTH, groups=(), device=device)
        for step in range(3):
            inputs = [x.to(device) for x in batches(4, WIDTH, step, 40)]
            expected = run_step(off, inputs, in_flight=3, offload=False)
            assert same_bits(run_step(on, inputs, in_flight=3), expected)
        assert manager.statistics().bytes_offloaded > 0
        assert_idle(manager)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == warns
    assert all("pinned memory" in m and "ulimit -l" in m for m in messages)


@pytest.mark.parametrize("kind", BACKENDS)
def test_over_budget_groups_stay_with_one_warning(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = OffloadConfig(min_offloaded_tensor_size=1, host_budget_bytes=0)
    with (
        caplog.at_level(logging.WARNING, logger="pp_offload"),
        use_backend(make_backend(kind), config=config) as manager,
    ):
        device = str(manager.backend.device)
        on = make_model(width=WIDTH, device=device)
        off = make_model(width=WIDTH, groups=(), device=device)
        for step in range(3):
            inputs = [x.to(device) for x in batches(4, WIDTH, step)]
            expected = run_step(off, inputs, in_flight=3, offload=False)
            assert same_bits(run_step(on, inputs, in_flight=3), expected)
        assert manager.statistics().bytes_offloaded == 0
        assert manager.statistics().host_allocations == 0
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "host_budget_bytes" in messages[0]


def begun_chunk(manager: PipelineOffloadManager) -> ChunkOffloadHandler:
    manager.init_model_chunk_offload_handler(None, None, 1)
    chunk = manager.cur_forward_chunk()
    assert chunk is not None
    return chunk


def saved_in_group(
    chunk: ChunkOffloadHandler, name: str, tensors: Sequence[torch.Tensor]
) -> list[Any]:
    """What a group of the chunk saves, which is committed."""
    group = chunk.start(name)
    packed = [chunk.pack(group, tensor) for tensor in tensors]
    chunk.commit(name)
    return packed


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_group_with_room_for_half_of_it_takes_none(kind: str) -> None:
    """Its room is there for others, though autograd holds what was to leave. What another group has
    sent already takes no room.
    """
    num = 2**19  # elements, so that no two share a slab
    config = OffloadConfig(min_offloaded_tensor_size=1, host_budget_bytes=3 * 4 * num)
    with use_backend(make_backend(kind), config=config) as manager:
        device = manager.backend.device
        shared, *others = (
            torch.full((num,), float(i), device=device).exp().requires_grad_() for i in range(4)
        )
        expected = [tensor.detach().clone() for tensor in (*others, shared, shared)]
        chunk = begun_chunk(manager)
        first = saved_in_group(chunk, "first", [shared])
        saved = saved_in_group(chunk, "second", [*others, shared])
        assert manager.statistics().host_bytes_in_use == shared.nbytes
        for tensor, value in zip([*saved, *first], expected, strict=True):
            assert tensor.unpack().equal(value)
        assert manager.statistics().bytes_offloaded == shared.nbytes
        del first, saved, tensor
        assert_idle(manager)
