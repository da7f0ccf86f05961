"""What is brought and sent without tickets: valid when settled, kept alive until then."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from conftest import make_backend

from pp_offload import OffloadConfig
from pp_offload._slices.plain_copies import PlainCopies

SHAPES = [(3, 5), (0, 2), (), (4, 1), (2, 3, 2, 2)]


def test_there_and_back(backend) -> None:
    with backend.activate():
        copies = PlainCopies(backend, OffloadConfig())
        sources = [torch.randn(shape).to(backend.device) for shape in SHAPES]
        sources[4] = sources[4].to(memory_format=torch.channels_last)
        sources.append(torch.randn(3, 1).to(backend.device).expand(3, 4))
        sources.append(torch.randn(3, dtype=torch.complex64).to(backend.device).conj())
        sources.append(torch.arange(5, device=backend.device)[::2])
        sent = copies.synchronize(copies.copy_to_host(sources, "gradients"))
        assert all(tensor.device.type == "cpu" for tensor in sent)
        brought = copies.synchronize(copies.copy_to_device(sent, "parameters"))
        for tensor, host, source in zip(brought, sent, sources, strict=True):
            assert tensor.device == backend.device and tensor.dtype == source.dtype
            assert torch.equal(tensor, source) and torch.equal(host, source.cpu())
        assert sent[4].stride() == sources[4].stride()
        assert brought[4].stride() == sources[4].stride()
        moved = sum(tensor.numel() * tensor.itemsize for tensor in sources)
        statistics = copies.statistics()
        assert statistics.bytes_offloaded == statistics.bytes_reloaded == moved
        assert statistics.bytes_in_flight == 0


@pytest.mark.parametrize("way", ["copy_to_device", "copy_to_host"])
def test_copies_that_are_still_queued_end_before_their_memory_is_freed(way: str) -> None:
    """A model may be dropped while its next slice is on the way."""
    backend = make_backend("late")
    with backend.activate():
        copies = PlainCopies(backend, OffloadConfig())
        getattr(copies, way)([torch.ones(4)], "parameters")
        assert backend.pending == 1
        del copies
        gc.collect()
        assert backend.pending == 0
        backend.synchronize()  # it raises if a copy uses what was freed
        backend.check()


@pytest.mark.parametrize("way", ["copy_to_device", "copy_to_host"])
def test_memory_outlives_a_copy_that_was_cut_off(way: str, monkeypatch) -> None:
    backend = make_backend("late")
    with backend.activate():
        copies = PlainCopies(backend, OffloadConfig())
        copy = backend.copy

        def and_interrupt(*args: Any) -> None:
            copy(*args)
            raise KeyboardInterrupt

        monkeypatch.setattr(backend, "copy", and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            getattr(copies, way)([torch.ones(4)], "parameters")
        copies.poll()
        backend.synchronize()  # it raises if a copy uses what was freed
        statistics = copies.statistics()
        assert statistics.bytes_in_flight == statistics.host_bytes_in_use == 0
        backend.check()


def test_bytes_in_flight_are_bounded() -> None:
    backend = make_backend("late")
    with backend.activate():
        copies = PlainCopies(backend, OffloadConfig(max_in_flight_bytes=64))
        for _ in range(4):
            copies.copy_to_host([torch.ones(10)], "gradients")
            assert copies.statistics().bytes_in_flight <= 64
        assert backend.pending == 1
