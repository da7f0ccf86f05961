"""What is on the device is what is on the host now, in memory of the stream that computes."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from pp_offload import OffloadConfig
from pp_offload._slices.cache import SliceCache
from pp_offload._slices.places import Slice
from pp_offload._slices.plain_copies import PlainCopies
from pp_offload.testing import SimulatedBackend


class Run:
    """A forward."""


RUN = Run()


def slices_of(num: int) -> list[Slice]:
    return [Slice(f"slice {i}", (Parameter(torch.full((4,), float(i))),), ()) for i in range(num)]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_what_the_program_has_written_is_brought_again(is_replaced: bool) -> None:
    backend = SimulatedBackend("late")
    with backend.activate():
        cache = SliceCache(PlainCopies(backend, OffloadConfig()))
        (slice_,) = slices_of(1)
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


def test_a_slice_on_one_stream_is_brought_again_for_another() -> None:
    """Its memory returns to the stream that it belongs to, which does not wait for the other."""
    backend = SimulatedBackend("late")
    with backend.activate():
        cache = SliceCache(PlainCopies(backend, OffloadConfig()))
        (slice_,) = slices_of(1)
        (first,) = cache.use(slice_, RUN)
        with backend.stream(backend.new_stream("other")):
            (second,) = cache.use(slice_, RUN)
            assert second is not first and second.add(1).eq(1).all()
        backend.check()
