"""Slices are cut evenly; what is on the device is what is on the host now; copies stay alive."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from pp_offload import OffloadConfig
from pp_offload._slices.cache import SliceCache
from pp_offload._slices.plain_copies import PlainCopies
from pp_offload._slices.slices import Slice, partition
from pp_offload.testing import SimulatedBackend

late = pytest.mark.parametrize("backend", ["late"], indirect=True)


def test_slices_have_about_equal_bytes() -> None:
    """With layers that have no parameters."""
    for seed in range(200):
        draw = random.Random(seed)
        sizes = [draw.choice([0, *range(10, 60)]) for _ in range(draw.randrange(1, 20))]
        layers = [{index: nbytes} for index, nbytes in enumerate(sizes)]
        for num_slices in range(1, len(layers) + 1):
            slices = partition(layers, num_slices)
            assert len(slices) == num_slices and all(slices)
            assert [i for indices in slices for i in indices] == list(range(len(layers)))
            most = max(sum(sizes[i] for i in indices) for indices in slices)
            assert most <= sum(sizes) / num_slices + max(sizes), seed


def test_a_shared_parameter_counts_once() -> None:
    layers = [{1: 8, 2: 8}, {1: 8, 2: 8}, {3: 8}, {4: 8}]
    assert partition(layers, 2) == [range(2), range(2, 4)]


class Run:
    """A forward."""


RUN = Run()


@pytest.fixture
def slice_() -> Slice:
    return Slice("slice 0", (Parameter(torch.zeros(4)),), ())


@pytest.fixture
def cache(active: SimulatedBackend) -> SliceCache:
    return SliceCache(PlainCopies(active, OffloadConfig()))


@late
@pytest.mark.parametrize("is_replaced", [False, True])
def test_what_the_program_has_written_is_brought_again(
    cache: SliceCache, slice_: Slice, is_replaced: bool
) -> None:
    (parameter,) = slice_.parameters
    cache.use(slice_, RUN)
    for index in (None, 0):
        with torch.no_grad():
            if is_replaced:
                parameter.data = parameter + 1
            else:
                parameter.add_(1)
        (tensor,) = cache.use(slice_, RUN, index)
        assert tensor.tolist() == parameter.tolist()


@late
def test_a_slice_on_one_stream_is_brought_again_for_another(
    active: SimulatedBackend, cache: SliceCache, slice_: Slice
) -> None:
    """Its memory returns to the stream that it belongs to, which does not wait for the other."""
    (first,) = cache.use(slice_, RUN)
    with active.stream(active.new_stream("other")):
        (second,) = cache.use(slice_, RUN)
        assert second is not first and second.add(1).eq(1).all()
    active.check()


@late
@pytest.mark.parametrize("way", ["copy_to_device", "copy_to_host"])
def test_copies_that_are_still_queued_end_before_their_memory_is_freed(
    active: SimulatedBackend, way: str
) -> None:
    """A model may be dropped while its next slice is on the way."""
    copies = PlainCopies(active, OffloadConfig())
    getattr(copies, way)([torch.ones(4)], "parameters")
    assert active.pending == 1
    del copies
    gc.collect()
    assert active.pending == 0
    active.synchronize()  # it raises if a copy uses what was freed
    active.check()


@late
@pytest.mark.parametrize("way", ["copy_to_device", "copy_to_host"])
def test_memory_outlives_a_copy_that_was_cut_off(
    active: SimulatedBackend, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, copy = PlainCopies(active, OffloadConfig()), active.copy

    def and_interrupt(*args: Any) -> None:
        copy(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(active, "copy", and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        getattr(copies, way)([torch.ones(4)], "parameters")
    copies.poll()
    active.synchronize()  # it raises if a copy uses what was freed
    statistics = copies.statistics()
    assert statistics.bytes_in_flight == statistics.host_bytes_in_use == 0
    active.check()


@late
def test_bytes_in_flight_are_bounded(active: SimulatedBackend) -> None:
    copies = PlainCopies(active, OffloadConfig(max_in_flight_bytes=64))
    for _ in range(4):
        copies.copy_to_host([torch.ones(10)], "gradients")
        assert copies.statistics().bytes_in_flight <= 64
    assert active.pending == 1
