"""Slices are cut evenly; what is on the device is what is on the host now; copies stay alive."""

from __future__ import annotations

import gc
import itertools
import random
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from pp_offload import OffloadConfig
from pp_offload._slices.cache import SliceCache
from pp_offload._slices.places import Slice
from pp_offload._slices.plain_copies import PlainCopies
from pp_offload._slices.slices import partition, slice_bytes
from pp_offload.testing import SimulatedBackend

late = pytest.mark.parametrize("backend", ["late"], indirect=True)


def largest(layers: list[dict[int, int]], slices: list[Any]) -> int:
    return max(slice_bytes([layers[i] for i in indices]) for indices in slices)


def smallest_largest(layers: list[dict[int, int]], num_slices: int) -> int:
    """Over all ways to cut."""
    cuts = itertools.combinations(range(1, len(layers)), num_slices - 1)
    ways = (zip((0, *cut), (*cut, len(layers)), strict=True) for cut in cuts)
    return min(largest(layers, [range(*ends) for ends in way]) for way in ways)


def test_no_way_to_cut_is_better() -> None:
    """With layers that share parameters, and some that have none."""
    for seed in range(50):
        draw = random.Random(seed)
        layers = [
            {key: 10 + key for key in draw.sample(range(6), draw.randrange(4))}
            for _ in range(draw.randrange(1, 9))
        ]
        for num_slices in range(1, len(layers) + 1):
            slices = partition(layers, num_slices)
            assert len(slices) == num_slices and all(slices)
            assert [i for indices in slices for i in indices] == list(range(len(layers)))
            assert largest(layers, slices) == smallest_largest(layers, num_slices), seed


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
