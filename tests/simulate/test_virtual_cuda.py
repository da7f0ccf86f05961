"""A program for ``torch.cuda`` takes the times and the memory that its streams say, by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from virtual_cuda import virtual_cuda

from pp_offload.simulate import DEVICES, VirtualBackend

NUMEL = 2**20
BYTES = 4 * NUMEL
FAST = replace(DEVICES["H100"], launch_s=0.0, copy_latency_s=0.0)
COPY_S = BYTES / FAST.link_bytes_per_s

NAMES = [
    (torch.cuda, ("Stream", "Event", "current_stream", "stream", "synchronize")),
    (torch.cuda.nvtx, ("range_push", "range_pop")),
    (torch, ("empty",)),
    (Tensor, ("is_pinned", "record_stream")),
]


def meant() -> list[Any]:
    """What the names mean now, and whether that is the owner's own or inherited."""
    return [(getattr(one, name), name in vars(one)) for one, names in NAMES for name in names]


@contextmanager
def device(**rates: float) -> Iterator[VirtualBackend]:
    """A virtual one that programs for ``torch.cuda`` run on."""
    backend = VirtualBackend(replace(FAST, **rates))
    with backend.activate(), virtual_cuda(backend):
        yield backend


def on_device() -> Tensor:
    return torch.empty(NUMEL, device="meta")


def on_host() -> Tensor:
    return torch.empty(NUMEL, pin_memory=True)


class Mover:
    """As Megatron's module does it: a stream and an event for each way, and ``record_stream``."""

    def __init__(self) -> None:
        self.out, self.back = torch.cuda.Stream(), torch.cuda.Stream()
        self.is_out, self.is_back = torch.cuda.Event(), torch.cuda.Event()

    def offload(self, x: Tensor) -> Tensor:
        host = on_host()
        self.out.wait_stream(torch.cuda.current_stream())
        torch.cuda.nvtx.range_push("offload")
        with torch.cuda.stream(self.out):
            host.copy_(x, non_blocking=True)
            x.record_stream(self.out)
            self.is_out.record(self.out)
        torch.cuda.nvtx.range_pop()
        return host

    def reload(self, host: Tensor) -> Tensor:
        with torch.cuda.stream(self.back):
            self.back.wait_event(self.is_out)
            x = on_device()
            x.copy_(host, non_blocking=host.is_pinned())
            self.is_back.record()
        torch.cuda.current_stream().wait_event(self.is_back)
        return x


def test_the_names_mean_what_they_meant_afterwards() -> None:
    before = meant()
    with pytest.raises(RuntimeError, match="mine"), device():
        assert not any(one[0] is other[0] for one, other in zip(before, meant(), strict=True))
        raise RuntimeError("mine")
    assert meant() == before


def test_copies_run_beside_compute_and_wait_for_what_they_wait_for() -> None:
    with device() as backend:
        mover, x = Mover(), on_device()
        x = x + 1
        made_s = backend.compute.free_at_s
        host = mover.offload(x)
        x = x + 1
        add_s = backend.compute.free_at_s - made_s
        assert 0 < add_s < COPY_S
        assert mover.out.free_at_s == pytest.approx(made_s + COPY_S), "from when x is made"
        y = mover.reload(host)
        assert mover.back.free_at_s == pytest.approx(made_s + 2 * COPY_S), "behind the way out"
        assert backend.host.now_s == 0.0, "it waits for none of this"
        y + 1
        end_s = made_s + 2 * COPY_S + add_s
        assert backend.compute.free_at_s == pytest.approx(end_s)
        assert backend.compute.stalled_s == pytest.approx(2 * COPY_S - add_s)
        assert (backend.link.bytes_to_host, backend.link.bytes_to_device) == (BYTES, BYTES)
        torch.cuda.synchronize()
        assert backend.host.now_s == pytest.approx(end_s)


def test_what_was_copied_is_free_when_the_host_sees_that_the_copy_has_ended() -> None:
    with device() as backend:
        mover, x = Mover(), on_device()
        host = mover.offload(x)
        del x
        later = on_device()
        assert backend.memory.live_bytes == 2 * BYTES
        mover.is_out.synchronize()
        assert backend.memory.live_bytes == BYTES
        back = mover.reload(host)
        assert backend.memory.live_bytes == 2 * BYTES
        del back, later
        assert backend.memory.live_bytes == 0, "what was not recorded is free at once"


def test_the_live_stream_is_that_which_was_entered() -> None:
    with device() as backend:
        side = torch.cuda.Stream()
        assert torch.cuda.current_stream() is backend.compute
        with torch.cuda.stream(side):
            assert torch.cuda.current_stream() is side
            on_device() + 1
        assert torch.cuda.current_stream() is backend.compute
        assert side.busy_s > 0 and backend.compute.busy_s == 0
        assert backend.seconds == side.free_at_s, "it is one of the device's"


def test_an_event_has_passed_until_it_is_recorded() -> None:
    with device() as backend:
        event, side = torch.cuda.Event(), torch.cuda.Stream()
        assert event.query()
        backend.compute.launch(1.0)
        side.wait_event(event)
        assert side.launch(1.0) == 1.0, "nothing to wait for"
        event.record()
        assert not event.query()
        side.wait_event(event)
        backend.compute.launch(5.0)
        event.record()
        assert side.launch(1.0) == 2.0, "it waits for the first time, which was at 1"
        side.wait_event(event)
        assert side.launch(1.0) == 7.0


def test_memory_is_pinned_where_it_was_asked_for() -> None:
    with device():
        assert on_host().is_pinned()
        assert not torch.empty(NUMEL).is_pinned() and not on_device().is_pinned()


def test_the_host_waits_for_copies_of_what_is_not_pinned() -> None:
    """For the program says so, as Megatron's does."""
    with device() as backend:
        Mover().reload(torch.empty(NUMEL))
        assert backend.host.now_s == pytest.approx(COPY_S)


def test_what_is_not_here_is_an_error() -> None:
    with device(), pytest.raises(TypeError):
        torch.cuda.Stream("cuda:1")
