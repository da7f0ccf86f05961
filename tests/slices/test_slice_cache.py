"""A few slices at most are on the device, as they are on the host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from pp_offload import OffloadConfig
from pp_offload._slices.cache import Slice, SliceCache
from pp_offload._slices.plain_copies import PlainCopies
from pp_offload.testing import SimulatedBackend


def slices_of(num: int) -> list[Slice]:
    return [Slice(f"slice {i}", (Parameter(torch.full((4,), float(i))),), ()) for i in range(num)]


class Run:
    """A forward."""


RUN = Run()


def values(cache: SliceCache, slice_: Slice) -> list[float]:
    (tensor,) = cache.use(slice_, RUN)
    return tensor.tolist()


def write(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.add_(1)


def replace(parameter: Tensor) -> None:
    parameter.data = parameter.data + 1


@pytest.mark.parametrize("change", [write, replace])
@pytest.mark.parametrize("is_foreseen", [True, False])
def test_what_changed_is_brought_again(backend, is_foreseen: bool, change) -> None:
    with backend.activate():
        cache = SliceCache(PlainCopies(backend, OffloadConfig()))
        first, second = slices_of(2)
        wanted = second if is_foreseen else first
        cache.use(first, RUN)
        cache.prefetch(second)
        backend.synchronize()
        change(wanted.parameters[0])
        assert values(cache, wanted) == wanted.parameters[0].tolist()
        change(wanted.parameters[0])
        assert cache.use(wanted, RUN, 0)[0].tolist() == wanted.parameters[0].tolist()
        cache.drop()


def test_a_slice_on_one_stream_is_brought_again_for_another() -> None:
    """Its memory returns to the stream that it belongs to, which does not wait for the other."""
    backend = SimulatedBackend("late")
    with backend.activate():
        cache = SliceCache(PlainCopies(backend, OffloadConfig()))
        (one,) = slices_of(1)
        (first,) = cache.use(one, RUN)
        with backend.stream(backend.new_stream("other")):
            (second,) = cache.use(one, RUN)
            assert second is not first and second.add(1).eq(1).all()
        backend.check()


@pytest.mark.parametrize("num_resident", [1, 2, 3, 4])
def test_no_more_are_on_the_device_than_it_was_told(backend, num_resident: int) -> None:
    """And each is brought once, though it is asked for several times before it is used."""
    with backend.activate():
        cache = SliceCache(PlainCopies(backend, OffloadConfig()), num_resident)
        slices = slices_of(6)
        for number, one in enumerate(slices):
            assert values(cache, one) == one.parameters[0].tolist()
            cache.prefetch(*slices[number + 1 :])
            assert cache.nbytes == 16 * min(num_resident, 6 - number)
        assert cache.peak_bytes == 16 * num_resident
        assert cache.copies.statistics().bytes_reloaded == 6 * 16


def test_what_was_foreseen_wrongly_is_given_up(backend) -> None:
    with backend.activate():
        cache = SliceCache(PlainCopies(backend, OffloadConfig()), 3)
        first, second, third, fourth = slices_of(4)
        cache.use(first, RUN)
        cache.prefetch(second, third)
        cache.prefetch(third, fourth)
        assert cache.copies.statistics().bytes_reloaded == 4 * 16
        assert values(cache, second) == [1.0] * 4, "nothing of the others is left"
        assert cache.nbytes == 16
        cache.prefetch(first)
        cache.settle()
        write(first.parameters[0])
        assert cache.nbytes == 16
