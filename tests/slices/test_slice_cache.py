"""What is on the device is what is on the host now, in memory of the stream that computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from pp_offload import OffloadConfig
from pp_offload._slices.cache import SliceCache
from pp_offload._slices.places import Slice
from pp_offload._slices.plain_copies import PlainCopies
from pp_offload.backends import Backend
from pp_offload.testing import SimulatedBackend


class Run:
    """A forward."""


RUN = Run()


def slices_of(num: int) -> list[Slice]:
    return [Slice(f"slice {i}", (Parameter(torch.full((4,), float(i))),), ()) for i in range(num)]


def write(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.add_(1)


def replace(parameter: Tensor) -> None:
    parameter.data = parameter.data + 1


@pytest.mark.parametrize("change", [write, replace])
@pytest.mark.parametrize("is_foreseen", [True, False])
def test_what_changed_is_brought_again(
    backend: Backend, is_foreseen: bool, change: Callable[[Tensor], None]
) -> None:
    with backend.activate():
        cache = SliceCache(PlainCopies(backend, OffloadConfig()))
        first, second = slices_of(2)
        wanted = second if is_foreseen else first
        cache.use(first, RUN)
        cache.prefetch(second)
        backend.synchronize()
        for index in (None, 0):
            change(wanted.parameters[0])
            (tensor,) = cache.use(wanted, RUN, index)
            assert tensor.tolist() == wanted.parameters[0].tolist()


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


def test_what_was_foreseen_wrongly_is_given_up(backend: Backend) -> None:
    with backend.activate():
        cache = SliceCache(PlainCopies(backend, OffloadConfig()), 3)
        first, second, third, fourth = slices_of(4)
        cache.use(first, RUN)
        cache.prefetch(second, third)
        cache.prefetch(third, fourth)
        assert cache.copies.statistics().bytes_reloaded == 4 * 16
        assert cache.use(second, RUN)[0].tolist() == [1.0] * 4, "nothing of the others is left"
        assert cache.nbytes == 16
