"""The waits that each copy needs, on PyTorch's own streams: without one the bytes come out wrong.

Whatever else the engine waits for, tests/core/test_order.py has on the simulated device.

In each test one stream stands still at a closed gate, and the others run on as far as they can.
Groups are opened and committed by Megatron's chunk, so that a test says what happens when.
"""

from __future__ import annotations

import gc
import time
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from emulated.helpers import WAIT_S, compute, late, some
from pp_offload import ChunkOffloadHandler, OffloadConfig
from pp_offload._groups.offloader import Offloader
from pp_offload._memory.host_pool import MIN_SLAB_BYTES
from pp_offload.backends import AcceleratorBackend

pytestmark = pytest.mark.emulated

N = MIN_SLAB_BYTES // 4
"""Numbers that fill a slab of host memory."""


class Chunk(ChunkOffloadHandler):
    """A chunk on an engine of its own."""

    def __init__(self, **options: Any) -> None:
        gc.collect()  # an engine that is left over might have seen the same streams
        config = OffloadConfig(min_offloaded_tensor_size=1, device_limit_bytes=None, **options)
        backend: Any = AcceleratorBackend()
        super().__init__(1, None, offloader=Offloader(backend, config))
        self.d2h, self.h2d = backend.d2h, backend.h2d

    def side(self) -> torch.Stream:
        """A stream of PyTorch's pool that is none of the copy streams."""
        copies = self.d2h, self.h2d
        return next(
            s for s in iter(lambda: torch.Stream(device="emulated"), None) if s not in copies
        )

    def save(self, *tensors: Tensor, on: torch.Stream | None = None) -> list[Any]:
        """Tags of a group that was saved on the stream ``on`` and is committed on the live one."""
        self.on_group_start_forward("g")
        with on or nullcontext():
            tags = [self.tensor_push(tensor) for tensor in tensors]
        self.on_group_commit_forward(None)
        return tags

    def away(self, *given: Tensor) -> list[Any]:
        """Tags of tensors whose bytes are in host memory alone."""
        tags = self.save(*[tensor.to("emulated") for tensor in given])
        self.settle()
        return tags

    def settle(self) -> None:
        """All copies have run, and the engine knows."""
        self.offloader.backend.synchronize()
        self.offloader.statistics()

    def brings(self, tag: Any, expected: Tensor) -> bool:
        """Whether a tensor comes back from the host with these bytes."""
        self.settle()
        return self.tensor_pop(tag).cpu().equal(expected)


def disk(folder: Path) -> dict[str, Any]:
    """Options of an engine whose groups go to the disk."""
    return {"tiers": ("disk",), "disk_dir": folder, "max_in_flight_bytes": 2**30}


def wait_until(condition: Any) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def use_of_memory() -> Tensor:
    """A kernel on the live stream that gets the memory that was freed last."""
    return torch.full((N,), 5.0, device="emulated")


# Copies to the host


@pytest.mark.parametrize("is_aside", [False, True], ids=["live stream", "side stream"])
@pytest.mark.parametrize("columns", [1024, 700], ids=["whole", "gathered"])
def test_a_copy_to_the_host_waits_for_what_computed_the_tensor(
    emulated: ModuleType, is_aside: bool, columns: int
) -> None:
    chunk, given = Chunk(), some(N).view(-1, 1024)
    x = given.to("emulated")
    stream = chunk.side() if is_aside else compute()
    others = [chunk.d2h, compute()] if is_aside else [chunk.d2h]
    with late(emulated, stream, *others):
        with stream:
            y = x * 2
        (tag,) = chunk.save(y[:, :columns], on=stream)
    assert chunk.brings(tag, (given * 2)[:, :columns])


@pytest.mark.parametrize("is_aside", [False, True], ids=["live stream", "side stream"])
@pytest.mark.parametrize(
    "options", [{}, {"max_in_flight_bytes": 0}], ids=["auto", "none in flight"]
)
def test_a_source_lives_until_it_is_copied(
    emulated: ModuleType, is_aside: bool, options: dict[str, int]
) -> None:
    chunk, given = Chunk(**options), some(N)
    stream = chunk.side() if is_aside else compute()
    with stream:
        x = given.to("emulated")
    with late(emulated, chunk.d2h, stream):
        (tag,) = chunk.save(x, on=stream)
        del x
        chunk.offloader.statistics()
        with stream:
            use_of_memory()
    assert chunk.brings(tag, given)


@pytest.mark.parametrize("next_numel", [N, N // 2], ids=["the same bytes", "a part of them"])
def test_host_memory_is_written_behind_its_last_reader(
    emulated: ModuleType, next_numel: int
) -> None:
    """A reload for one stream is late; a forward on another one is given the same host memory."""
    chunk, given = Chunk(), some(N)
    (tag,), side = chunk.away(given), chunk.side()
    x = some(next_numel).to("emulated")
    with late(emulated, chunk.h2d, side, chunk.d2h):
        result = chunk.tensor_pop(tag) * 2
        del tag
        with side:
            tags = chunk.save(x)
    assert result.cpu().equal(given * 2)
    assert chunk.offloader.statistics().host_bytes_reserved == MIN_SLAB_BYTES
    del tags


# Copies to the device


def test_a_reload_waits_for_the_offload(emulated: ModuleType) -> None:
    """For another stream, which may not take the source back."""
    chunk, given = Chunk(), some(N)
    x, side = given.to("emulated"), chunk.side()
    with late(emulated, chunk.d2h, chunk.h2d):
        (tag,) = chunk.save(x)
        with side:
            result = chunk.tensor_pop(tag)
    assert result.cpu().equal(given)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_reload_waits_for_compute(emulated: ModuleType, tier: str, tmp_path: Path) -> None:
    """A kernel still reads another tensor in the memory that it is given."""
    chunk = Chunk(**disk(tmp_path) if tier == "disk" else {})
    given, others = some(N), some(N)
    (tag,) = chunk.away(others)
    wait_until(lambda: tier == "host" or chunk.offloader.statistics().host_bytes_in_use == 0)
    gc.collect()
    emulated.empty_cache()
    x = given.to("emulated")
    address = x.data_ptr()
    with late(emulated, compute(), chunk.h2d):
        result = x * 2
        del x
        target = chunk.tensor_pop(tag)
    assert target.data_ptr() == address
    assert result.cpu().equal(given * 2) and target.cpu().equal(others)


@pytest.mark.parametrize("is_ahead", [False, True], ids=["on demand", "ahead"])
def test_compute_waits_for_a_reload(emulated: ModuleType, is_ahead: bool) -> None:
    chunk, given = Chunk(), some(N)
    (tag,) = chunk.away(given)
    with late(emulated, chunk.h2d, compute()):
        if is_ahead:
            chunk.bulk_reload_group()
        result = chunk.tensor_pop(tag) * 2
    assert result.cpu().equal(given * 2)


# The disk


def test_a_thread_writes_what_has_arrived(emulated: ModuleType, tmp_path: Path) -> None:
    chunk, given = Chunk(**disk(tmp_path)), some(N)
    x = given.to("emulated")
    with late(emulated, chunk.d2h):
        (tag,) = chunk.save(x)
        time.sleep(WAIT_S)
    wait_until(lambda: chunk.offloader.statistics().host_bytes_in_use == 0)
    assert chunk.brings(tag, given)
