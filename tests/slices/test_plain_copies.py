"""What is brought and sent without tickets: valid when settled, kept alive until then."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from conftest import make_backend

from pp_offload import OffloadConfig, RaceError
from pp_offload._memory.budget import reserved_bytes
from pp_offload._memory.host_pool import ALIGNMENT, HostPool, pageable
from pp_offload._memory.host_tensors import host_tensors
from pp_offload._slices.plain_copies import PendingCopy, PlainCopies

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
        assert all(one.device.type == "cpu" for one in sent)
        brought = copies.synchronize(copies.copy_to_device(sent, "parameters"))
        for one, host, source in zip(brought, sent, sources, strict=True):
            assert one.device == backend.device and one.dtype == source.dtype
            assert torch.equal(one, source) and torch.equal(host, source.cpu())
        assert sent[4].stride() == sources[4].stride()
        assert brought[4].stride() == sources[4].stride()
        moved = sum(one.numel() * one.itemsize for one in sources)
        told = copies.statistics()
        assert told.bytes_offloaded == told.bytes_reloaded == moved
        assert told.bytes_in_flight == 0


@pytest.mark.parametrize("kind", ["late", "cpu threads"])
def test_sources_and_targets_live_until_the_copy_ran(kind: str) -> None:
    backend = make_backend(kind)
    with backend.activate():
        copies = PlainCopies(backend, OffloadConfig())
        source = torch.randn(4)
        pending = copies.copy_to_host([source], "gradients")
        storages = [weakref.ref(t.untyped_storage()) for t in (source, pending.tensors[0])]
        there = torch.randn(4)
        coming = copies.copy_to_device([there], "parameters")
        storages += [weakref.ref(t.untyped_storage()) for t in (there, coming.tensors[0])]
        del source, pending, there, coming
        if kind == "late":
            assert all(storage() is not None for storage in storages)
        backend.synchronize()
        copies.poll()
        gc.collect()
        assert all(storage() is None for storage in storages)
    if kind == "late":
        backend.check()


@pytest.mark.parametrize("way", ["copy_to_device", "copy_to_host"])
def test_copies_under_way_are_waited_for_when_all_is_let_go(way: str) -> None:
    """As with a model that goes while its next slice comes."""
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
        told = copies.statistics()
        assert told.bytes_in_flight == told.host_bytes_in_use == 0
        backend.check()


def test_not_waited_for_is_a_race() -> None:
    backend = make_backend("late")
    with backend.activate():
        copies = PlainCopies(backend, OffloadConfig())
        pending = copies.copy_to_device([torch.ones(4)], "parameters")
        with pytest.raises(RaceError):
            pending.tensors[0].sum()
        copies.synchronize(pending)
        assert pending.tensors[0].sum() == 4
        source = torch.ones(4)
        pending = copies.copy_to_host([source], "gradients")
        with pytest.raises(RaceError):
            source.add_(1)
        copies.synchronize(pending)
        source.add_(1)


class Spied:
    """An event that tells who waited for it."""

    waited = False

    def query(self) -> bool:
        return self.waited

    def synchronize(self) -> None:
        self.waited = True


def test_the_host_waits_and_no_stream() -> None:
    backend = make_backend("late")
    copies = PlainCopies(backend, OffloadConfig())
    event = Spied()
    tensors = [torch.ones(1)]
    assert (
        copies.synchronize(PendingCopy(tensors, event, backend.current_stream(), "gradients"))
        is tensors
    )
    assert event.waited


def test_bytes_in_flight_are_bounded() -> None:
    backend = make_backend("late")
    with backend.activate():
        copies = PlainCopies(backend, OffloadConfig(max_in_flight_bytes=64))
        for _ in range(4):
            copies.copy_to_host([torch.ones(10)], "gradients")
            assert copies.statistics().bytes_in_flight <= 64
        assert backend.pending == 1


def test_host_tensors_are_like_others_and_apart() -> None:
    likes = [torch.empty(shape) for shape in SHAPES]
    likes[4] = likes[4].to(memory_format=torch.channels_last)
    taken: list[int] = []

    def allocate(nbytes: int) -> torch.Tensor:
        taken.append(nbytes)
        return pageable(nbytes)

    tensors = host_tensors(likes, HostPool(allocate))
    assert len(taken) == 1
    for number, (tensor, like) in enumerate(zip(tensors, likes, strict=True)):
        assert (tensor.shape, tensor.dtype, tensor.stride()) == (
            like.shape,
            like.dtype,
            like.stride(),
        )
        assert tensor.untyped_storage().nbytes() == like.nbytes
        assert not tensor.numel() or tensor.data_ptr() % ALIGNMENT == 0
        tensor.fill_(number)
    assert all(bool(tensor.eq(number).all()) for number, tensor in enumerate(tensors))
    assert [tensor.shape for tensor in host_tensors([torch.empty(0)], HostPool(allocate))] == [(0,)]


def test_what_has_to_be_there_is_counted_and_had_over_the_budget() -> None:
    """And it is free again when nobody has a view of it."""
    backend = make_backend("late")
    with backend.activate():
        copies = PlainCopies(backend, OffloadConfig(host_budget_bytes=1))
        before = reserved_bytes()
        tensors = copies.host_tensors([torch.empty(3, 5), torch.empty(7)])
        statistics = copies.statistics()
        assert statistics.host_bytes_in_use == 4 * (15 + 7)
        assert statistics.host_bytes_reserved == reserved_bytes() - before > 0
        view = tensors[1][2:]
        del tensors
        assert copies.statistics().host_bytes_in_use == 4 * (15 + 7)
        del view
        assert copies.statistics().host_bytes_in_use == 0


@pytest.mark.parametrize("budget_bytes", [None, 1])
def test_parameters_that_cannot_be_pinned_are_in_ordinary_memory(caplog, budget_bytes) -> None:
    """With one warning; the budget counts them."""
    backend = make_backend("late")
    with backend.activate():

        def refuse(nbytes: int) -> torch.Tensor:
            raise MemoryError("cannot pin")

        backend.allocate_host = refuse
        copies = PlainCopies(backend, OffloadConfig(host_budget_bytes=budget_bytes))
        tensors = [copies.host_tensors([torch.empty(2**20)]) for _ in range(2)]
        assert copies.statistics().host_bytes_reserved >= 2 * tensors[0][0].nbytes
        assert len(caplog.records) == 1
