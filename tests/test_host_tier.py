"""HostTier: buffers from slabs, reused by size, bounded by what was live at the peak."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pp_offload import ClosedError
from pp_offload.tiers.host import ALIGNMENT, SLAB_BYTES, HostBuffer, HostTier


class System:
    """Memory with a limit, and a record of what was asked."""

    def __init__(self, limit_bytes: int = 2**40) -> None:
        self.limit_bytes = limit_bytes
        self.asked: list[int] = []

    def allocate(self, nbytes: int) -> torch.Tensor:
        if sum(self.asked) + nbytes > self.limit_bytes:
            raise MemoryError(f"no {nbytes} bytes")
        self.asked.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)


class LateEvent:
    """An event that passes when told to."""

    def __init__(self) -> None:
        self.has_passed = False

    def query(self) -> bool:
        return self.has_passed

    def synchronize(self) -> None:
        self.has_passed = True


def span(buffer: HostBuffer) -> range:
    start = buffer.bytes.data_ptr()
    return range(start, start + buffer.nbytes)


@pytest.mark.parametrize("nbytes", [1, 511, 512, 513, 1000, SLAB_BYTES])
def test_a_buffer_has_the_bytes_asked_for(nbytes: int) -> None:
    buffer = HostTier(System().allocate).take(nbytes)
    assert buffer.nbytes == buffer.bytes.numel() == nbytes
    assert buffer.bytes.dtype is torch.uint8
    assert buffer.last_use is None


def test_slabs_are_powers_of_two_and_not_small() -> None:
    system = System()
    tier = HostTier(system.allocate)
    for nbytes in (1, 3 * 2**20, 5 * 2**20 + 1, 2**23):
        tier.take(nbytes)
    assert all(size >= SLAB_BYTES and size & (size - 1) == 0 for size in system.asked)
    assert tier.statistics().reserved == sum(system.asked)
    assert tier.statistics().num_allocations == len(system.asked)


def test_buffers_start_aligned_within_their_slab() -> None:
    tier = HostTier(System().allocate)
    assert all(tier.take(n).range.offset % ALIGNMENT == 0 for n in (1, 7, 513, 4000))


def test_small_buffers_share_a_slab() -> None:
    system = System()
    tier = HostTier(system.allocate)
    taken = [tier.take(1000) for _ in range(100)]
    assert len(taken) == 100
    assert len(system.asked) == 1


def test_a_returned_buffer_serves_the_next_of_its_size() -> None:
    tier = HostTier(System().allocate)
    buffer = tier.take(1000)
    tier.give(buffer)
    assert tier.take(1000) is buffer


def test_a_reused_buffer_still_knows_its_last_use() -> None:
    tier, event = HostTier(System().allocate), LateEvent()
    buffer = tier.take(1000)
    buffer.last_use = event
    tier.give(buffer)
    assert tier.take(1000).last_use is event


def test_bytes_of_other_sizes_are_reused_before_the_system_is_asked() -> None:
    system = System()
    tier = HostTier(system.allocate)
    for buffer in [tier.take(SLAB_BYTES // 4) for _ in range(4)]:
        tier.give(buffer)
    tier.take(SLAB_BYTES)
    assert len(system.asked) == 1


def test_bytes_whose_last_use_has_not_passed_are_not_carved_anew() -> None:
    system, event = System(), LateEvent()
    tier = HostTier(system.allocate)
    buffer = tier.take(SLAB_BYTES)
    buffer.last_use = event
    tier.give(buffer)
    other = tier.take(SLAB_BYTES // 2)
    assert len(system.asked) == 2
    assert not set(span(buffer)) & {span(other)[0], span(other)[-1]}
    event.has_passed = True
    tier.take(SLAB_BYTES)
    assert len(system.asked) == 2


def test_statistics_count_what_is_in_use() -> None:
    tier = HostTier(System().allocate)
    first, second = tier.take(1000), tier.take(24)
    assert (tier.statistics().in_use, tier.statistics().num_buffers) == (1024, 2)
    tier.give(first)
    assert (tier.statistics().in_use, tier.statistics().num_buffers) == (24, 1)
    tier.give(second)
    statistics = tier.statistics()
    assert (statistics.in_use, statistics.num_buffers, statistics.peak) == (0, 0, 1024)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_a_buffer_takes_the_shape_of_its_payload(dtype: torch.dtype) -> None:
    buffer = HostTier(System().allocate).take(240 * dtype.itemsize)
    shaped = buffer.shaped(torch.Size((12, 20)), dtype)
    assert (shaped.shape, shaped.dtype) == ((12, 20), dtype)
    assert shaped.is_contiguous()
    assert shaped.data_ptr() == buffer.bytes.data_ptr()
    assert buffer.shaped(torch.Size((12, 20)), dtype) is shaped
    assert buffer.shaped(torch.Size((240,)), dtype).shape == (240,)


def test_running_out_raises_and_leaves_the_tier_as_it_was() -> None:
    tier = HostTier(System(limit_bytes=SLAB_BYTES).allocate)
    buffer = tier.take(1000)
    before = tier.statistics()
    with pytest.raises(MemoryError):
        tier.take(2 * SLAB_BYTES)
    assert tier.statistics() == before
    tier.give(buffer)
    assert tier.take(1000) is buffer


def test_a_closed_tier_says_what_to_do() -> None:
    tier = HostTier(System().allocate)
    buffer = tier.take(1000)
    tier.close()
    with pytest.raises(ClosedError, match=r"closed; make a new manager"):
        tier.take(1000)
    tier.give(buffer)
    tier.close()


def test_buffers_may_come_back_from_any_thread() -> None:
    tier = HostTier(System().allocate)
    taken = [[tier.take(64) for _ in range(50)] for _ in range(4)]

    def give_all(buffers: list[HostBuffer]) -> None:
        for buffer in buffers:
            tier.give(buffer)

    threads = [threading.Thread(target=give_all, args=(own,)) for own in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tier.statistics().in_use == 0
    assert tier.statistics().num_buffers == 0


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3 * SLAB_BYTES // 2)), max_size=40))
def test_live_buffers_never_overlap(actions: list[tuple[bool, int]]) -> None:
    tier = HostTier(System().allocate)
    live: list[HostBuffer] = []
    for is_take, number in actions:
        if is_take or not live:
            live.append(tier.take(number))
        else:
            tier.give(live.pop(number % len(live)))
        spans = sorted((span(b)[0], span(b)[-1]) for b in live)
        assert all(a[1] < b[0] for a, b in zip(spans, spans[1:], strict=False))
        assert tier.statistics().in_use == sum(buffer.nbytes for buffer in live)


def test_a_steady_step_asks_the_system_for_nothing() -> None:
    system = System()
    tier = HostTier(system.allocate)
    for step in range(5):
        for buffer in [tier.take(n) for n in (1000, 70_000, 3000, SLAB_BYTES)]:
            tier.give(buffer)
        if step == 0:
            after_first = len(system.asked)
    assert len(system.asked) == after_first
