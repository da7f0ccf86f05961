"""Each wait of the engine through PyTorch's own streams: without it the bytes come out wrong.

In each test one stream stands still at a closed gate, and the others run on as far as they can.
Groups are opened and committed by Megatron's chunk, so that a test says what happens when.
"""

from __future__ import annotations

import gc
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.processes import run
from helpers.sessions import settle
from torch import Tensor

from emulated.helpers import compute, late, some
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
        settle(self.offloader)
        return tags

    def brings(self, tag: Any, expected: Tensor) -> bool:
        """Whether a tensor comes back from the host with these bytes."""
        settle(self.offloader)
        return self.tensor_pop(tag).cpu().equal(expected)


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


def test_the_stream_that_computed_waits_for_a_gather(emulated: ModuleType) -> None:
    """It writes there again, and no version tells."""
    chunk, given = Chunk(), some(N).view(-1, 1024)
    x, side = given.to("emulated"), chunk.side()
    with late(emulated, compute(), side):
        (tag,) = chunk.save(x[:, :700], on=side)
        with side:
            x.data.fill_(7)
    assert chunk.brings(tag, given[:, :700])


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


def test_a_forced_tensor_is_emptied_when_it_is_copied(emulated: ModuleType) -> None:
    chunk, given = Chunk(), some(N)
    x = given.to("emulated")
    with late(emulated, chunk.d2h, compute()):
        chunk.on_group_start_forward("g")
        tag = chunk.tensor_push(x)
        chunk.on_group_commit_forward([x])
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


def test_a_reload_waits_for_compute(emulated: ModuleType) -> None:
    """A kernel still reads another tensor in the memory that it is given."""
    chunk, given, others = Chunk(), some(N), some(N)
    (tag,) = chunk.away(others)
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


def test_memory_that_nobody_wants_is_free_behind_its_reload(emulated: ModuleType) -> None:
    """Also where the graph is part of a cycle, in which no weak reference calls anybody."""
    chunk = Chunk()
    tags = chunk.away(some(N))
    tags.append(tags)
    gc.collect()
    emulated.empty_cache()
    with late(emulated, chunk.h2d, compute()):
        chunk.bulk_reload_group()
        del tags
        gc.collect()
        chunk.offloader.statistics()  # lets go of what came for tensors that are gone
        result = use_of_memory()
    assert result.eq(5).all()


# Streams of somebody else


def test_a_source_is_taken_back_on_its_own_stream(emulated: ModuleType) -> None:
    chunk, given = Chunk(), some(N)
    x, side = given.to("emulated"), chunk.side()
    with late(emulated, side, compute()):
        with side:
            (tag,) = chunk.save(x * 2)
        result = chunk.tensor_pop(tag) * 2
    assert result.cpu().equal(given * 4)


@pytest.mark.parametrize("how", ["ahead", "with a use left", "used up"])
def test_what_came_for_another_stream_is_not_used_here(emulated: ModuleType, how: str) -> None:
    """That stream uses the memory again while a kernel of this one reads it."""
    chunk, given = Chunk(), some(N)
    x, side = given.to("emulated"), chunk.side()
    tags = chunk.save(*[x] * (2 if how == "with a use left" else 1))
    del x
    settle(chunk.offloader)
    with side:
        first = None
        if how == "ahead":
            chunk.bulk_reload_group()
        else:
            first = chunk.tensor_pop(tags[0])
    with late(emulated, compute(), side):
        result = chunk.tensor_pop(tags[-1]) * 2
        del tags, first
        with side:
            use_of_memory()
    assert result.cpu().equal(given * 2)


# The device alone: it is loaded in time, and where a wait is left out it gives other bytes


@pytest.mark.parametrize("waits", [False, True])
def test_a_copy_to_the_host_waits_for_a_kernel(emulated: ModuleType, waits: bool) -> None:
    given, d2h = some(N), torch.Stream(device="emulated")
    x, host = given.to("emulated"), torch.zeros(N, pin_memory=True)
    with late(emulated, compute(), d2h):
        y = x * 2
        if waits:
            d2h.wait_event(compute().record_event())
        with d2h:
            host.copy_(y, non_blocking=True)
    assert host.equal(given * 2) is waits


@pytest.mark.parametrize("waits", [False, True])
def test_a_kernel_waits_for_a_copy_to_the_device(emulated: ModuleType, waits: bool) -> None:
    given, h2d = some(N), torch.Stream(device="emulated")
    host, target = given.pin_memory(), torch.zeros(N, device="emulated")
    with late(emulated, h2d, compute()):
        with h2d:
            target.copy_(host, non_blocking=True)
        if waits:
            compute().wait_event(h2d.record_event())
        result = target * 2
    assert result.cpu().equal(given * 2) is waits


@pytest.mark.parametrize("keeps", ["nothing", "a wait", "record_stream"])
def test_freed_memory_is_used_again_in_the_order_of_its_stream(
    emulated: ModuleType, keeps: str
) -> None:
    given, side = some(N), torch.Stream(device="emulated")
    x, result = given.to("emulated"), torch.zeros(N, device="emulated")
    with late(emulated, side, compute()):
        with side:
            torch.add(x, 0, out=result)
        if keeps == "a wait":
            compute().wait_event(side.record_event())
        if keeps == "record_stream":
            x.record_stream(side)
        del x
        torch.zeros(N, device="emulated")
    assert result.cpu().equal(given) is (keeps != "nothing")


def test_it_is_loaded_before_the_first_backward(tmp_path: Path) -> None:
    """At which autograd starts its threads of devices, once in a process."""
    code = (
        "import emulated, torch; torch.ones(1, requires_grad=True).sum().backward(); "
        "emulated.load()"
    )
    done = run([sys.executable, "-c", code], tmp_path, cwd=Path(__file__).parents[1])
    assert done.returncode == 1
    assert "load it first, or in a process of its own" in done.stderr, done.stderr
