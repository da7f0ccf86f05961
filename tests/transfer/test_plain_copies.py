"""What is brought and sent without tickets: valid when settled, kept alive until then."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from conftest import make_backend
from test_hazards import cut_behind_the_copy

from pp_offload import OffloadConfig, RaceError
from pp_offload._memory.budget import reserved_bytes
from pp_offload._memory.host_tensors import ALIGNMENT, host_tensors
from pp_offload._memory.slabs import pageable
from pp_offload._transfer.plain_copies import PendingCopy, PlainCopies
from pp_offload._transfer.statistics import collect

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
        assert (
            copies.transfer.counters.bytes_offloaded
            == copies.transfer.counters.bytes_reloaded
            == moved
        )
        assert copies.transfer.copies.in_flight.nbytes == 0


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
def test_memory_outlives_a_copy_that_was_cut_off(way: str) -> None:
    backend = make_backend("late")
    with backend.activate():
        copies = PlainCopies(backend, OffloadConfig())
        with cut_behind_the_copy(backend):
            getattr(copies, way)([torch.ones(4)], "parameters")
        copies.poll()
        backend.synchronize()  # it raises if a copy uses what was freed
        copies.poll()
        assert copies._in_use == []
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
            assert copies.transfer.copies.in_flight.nbytes <= 64
        assert backend.pending == 1


def test_host_tensors_are_one_aligned_allocation() -> None:
    likes = [torch.empty(shape) for shape in SHAPES]
    taken: list[int] = []
    begins: list[int] = []

    def allocate(nbytes: int) -> torch.Tensor:
        memory = pageable(nbytes)
        taken.append(nbytes)
        begins.append(memory.data_ptr())
        return memory

    tensors = host_tensors(likes, allocate)
    assert taken == [4 * ALIGNMENT]
    for one, like in zip(tensors, likes, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (like.shape, like.dtype, like.stride())
        assert one.untyped_storage().nbytes() == like.nbytes
        if one.numel():
            at = one.data_ptr() - begins[0]
            assert at % ALIGNMENT == 0 and 0 <= at <= taken[0] - one.nbytes
    assert [one.shape for one in host_tensors([torch.empty(0)], allocate)] == [(0,)]
    assert taken[1:] == [1], "no tier has an empty buffer"


def test_what_has_to_be_there_is_counted_and_had_over_the_budget() -> None:
    """And it is free again when nobody has a view of it."""
    backend = make_backend("late")
    with backend.activate():
        copies = PlainCopies(backend, OffloadConfig(host_budget_bytes=1))
        before = reserved_bytes()
        tensors = copies.host_tensors([torch.empty(3, 5), torch.empty(7)])
        statistics = collect(copies.transfer)
        assert statistics.host_bytes_in_use == 2 * ALIGNMENT
        assert statistics.host_bytes_reserved == reserved_bytes() - before > 0
        view = tensors[1][2:]
        del tensors
        assert collect(copies.transfer).host_bytes_in_use == 2 * ALIGNMENT
        del view
        assert collect(copies.transfer).host_bytes_in_use == 0
