"""HostMemory: buffers from slabs, reused by size, bounded by what was live at the peak."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupts import interrupted

from pp_offload import ClosedError
from pp_offload._memory.budget import HostBudget, reserved_bytes
from pp_offload._memory.buffers import HostBuffer, Loan, room_for
from pp_offload._memory.host import ALIGNMENT, MAX_SIZES, HostMemory
from pp_offload._memory.slabs import FINENESS
from pp_offload._memory.slabs import SMALLEST_BYTES as SLAB_BYTES
from pp_offload._memory.unfinished import Unfinished


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


def spans(buffer: HostBuffer) -> list[tuple[int, int]]:
    """First and last address of each piece."""
    return [(p.data_ptr(), p.data_ptr() + p.numel() - 1) for p in buffer.pieces]


def overlap(loans: list[Loan]) -> bool:
    every = sorted(span for loan in loans for span in spans(loan.buffer))
    return any(a[1] >= b[0] for a, b in zip(every, every[1:], strict=False))


def budget(nbytes: int) -> HostBudget:
    """That much more than what other tests of this process hold."""
    return HostBudget(reserved_bytes() + nbytes)


@pytest.mark.parametrize("nbytes", [1, 511, 512, 513, 1000, SLAB_BYTES])
def test_a_buffer_has_the_bytes_asked_for(nbytes: int) -> None:
    buffer = HostMemory(System().allocate).allocate(nbytes).buffer
    assert buffer.nbytes == sum(piece.numel() for piece in buffer.pieces) == nbytes
    assert all(piece.dtype is torch.uint8 for piece in buffer.pieces)
    assert buffer.last_use is None


def test_slabs_are_powers_of_two_and_not_small() -> None:
    system = System()
    tier = HostMemory(system.allocate)
    for nbytes in (1, 3 * 2**20, 5 * 2**20 + 1, 2**23):
        tier.allocate(nbytes)
    assert all(size >= SLAB_BYTES and size & (size - 1) == 0 for size in system.asked)
    assert tier.statistics().reserved == sum(system.asked)
    assert tier.statistics().num_allocations == len(system.asked)


def test_buffers_start_aligned_within_their_slab() -> None:
    tier = HostMemory(System().allocate)
    taken = [tier.allocate(n) for n in (1, 7, 513, 4000)]
    assert all(loan.buffer.ranges[0].offset % ALIGNMENT == 0 for loan in taken)


def test_small_buffers_share_a_slab() -> None:
    system = System()
    tier = HostMemory(system.allocate)
    taken = [tier.allocate(1000) for _ in range(100)]
    assert len(taken) == 100
    assert len(system.asked) == 2


def test_a_returned_buffer_serves_the_next_of_its_size() -> None:
    tier = HostMemory(System().allocate)
    buffer = tier.allocate(1000).buffer  # nobody refers to the loan
    assert tier.allocate(1000).buffer is buffer


def test_a_reused_buffer_still_knows_its_last_use() -> None:
    tier, event = HostMemory(System().allocate), LateEvent()
    tier.allocate(1000).buffer.last_use = event
    assert tier.allocate(1000).buffer.last_use is event


def test_bytes_of_other_sizes_are_reused_before_the_system_is_asked() -> None:
    system = System()
    tier = HostMemory(system.allocate)
    taken = [tier.allocate(SLAB_BYTES // 4) for _ in range(4)]
    taken.clear()
    tier.allocate(SLAB_BYTES)
    assert len(system.asked) == 1


def test_bytes_carved_while_a_copy_uses_them_know_that_copy() -> None:
    system, event, other = System(), LateEvent(), LateEvent()
    tier = HostMemory(system.allocate)
    tier.allocate(SLAB_BYTES).buffer.last_use = event
    first = tier.allocate(SLAB_BYTES // 2)
    assert len(system.asked) == 1
    assert list(first.buffer.last_uses()) == [event]
    first.buffer.last_use, first.buffer.before = other, ()  # its copy waited for the earlier one
    assert list(first.buffer.last_uses()) == [other]
    second = tier.allocate(SLAB_BYTES // 2)
    assert list(second.buffer.last_uses()) == [event], "it may have been the other half"
    del second
    again = tier.allocate(SLAB_BYTES // 2)
    assert list(again.buffer.last_uses()) == [event], "nobody has waited for it yet"
    event.has_passed = True
    del again, first
    assert not [e for e in tier.allocate(SLAB_BYTES).buffer.last_uses() if e is event]


def test_busy_bytes_are_carved_only_where_no_others_are_left() -> None:
    system, event = System(), LateEvent()
    tier = HostMemory(system.allocate)
    busy, idle = tier.allocate(SLAB_BYTES), tier.allocate(SLAB_BYTES)
    busy.buffer.last_use = event
    del busy, idle
    taken = [tier.allocate(SLAB_BYTES // 2) for _ in range(3)]
    uses = [list(loan.buffer.last_uses()) for loan in taken]
    assert uses == [[], [], [event]]
    assert len(system.asked) == 2


def test_statistics_count_what_is_in_use() -> None:
    tier = HostMemory(System().allocate)
    first, second = tier.allocate(1000), tier.allocate(24)
    assert (tier.statistics().in_use, tier.statistics().num_buffers) == (1024, 2)
    del first
    assert (tier.statistics().in_use, tier.statistics().num_buffers) == (24, 1)
    del second
    statistics = tier.statistics()
    assert (statistics.in_use, statistics.num_buffers, statistics.peak) == (0, 0, 1024)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_a_buffer_takes_the_shape_of_its_payload(dtype: torch.dtype) -> None:
    buffer = HostMemory(System().allocate).allocate(240 * dtype.itemsize).buffer
    (begin, shaped) = buffer.shaped([(torch.Size((12, 20)), dtype)])[0]
    assert begin == 0
    assert (shaped.shape, shaped.dtype) == ((12, 20), dtype)
    assert shaped.is_contiguous()
    assert shaped.data_ptr() == buffer.pieces[0].data_ptr()
    assert buffer.shaped([(torch.Size((12, 20)), dtype)])[0][1] is shaped
    assert buffer.shaped([(torch.Size((240,)), dtype)])[0][1].shape == (240,)


def test_parts_lie_one_behind_the_other() -> None:
    parts = [
        (torch.Size((3,)), torch.float32),
        (torch.Size((65,)), torch.uint8),
        (torch.Size(()), torch.float64),
    ]
    rooms = [room_for(size.numel() * dtype.itemsize) for size, dtype in parts]
    assert rooms == [64, 128, 64]
    buffer = HostMemory(System().allocate).allocate(sum(rooms)).buffer
    places = buffer.shaped(parts)
    assert [begin for begin, _ in places] == [0, 64, 192]
    assert [(place.shape, place.dtype) for _, place in places] == parts
    start = buffer.pieces[0].data_ptr()
    assert [place.data_ptr() - start for _, place in places] == [0, 64, 192]


def test_running_out_raises_and_leaves_the_tier_as_it_was() -> None:
    tier = HostMemory(System().allocate, budget(SLAB_BYTES))
    loan = tier.allocate(1000)
    before = tier.statistics()
    with pytest.raises(MemoryError, match="host_budget_bytes"):
        tier.allocate(2 * SLAB_BYTES)
    assert tier.statistics() == before
    assert tier.allocate(SLAB_BYTES - 1024).nbytes == SLAB_BYTES - 1024
    buffer = loan.buffer
    del loan
    assert tier.allocate(1000).buffer is buffer


def test_a_closed_tier_says_what_to_do() -> None:
    tier = HostMemory(System().allocate)
    loan = tier.allocate(1000)
    tier.close()
    with pytest.raises(ClosedError, match=r"closed; make a new manager"):
        tier.allocate(1000)
    assert tier.statistics().in_use == 1000
    del loan
    assert tier.statistics().in_use == 0
    tier.close()


def test_buffers_may_come_back_from_any_thread() -> None:
    tier = HostMemory(System().allocate)
    taken = [[tier.allocate(64) for _ in range(50)] for _ in range(4)]

    threads = [threading.Thread(target=own.clear) for own in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tier.statistics().in_use == 0
    assert tier.statistics().num_buffers == 0


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3 * SLAB_BYTES // 2)), max_size=40))
def test_live_buffers_never_overlap(actions: list[tuple[bool, int]]) -> None:
    tier = HostMemory(System().allocate)
    live: list[Loan] = []
    for is_take, number in actions:
        if is_take or not live:
            live.append(tier.allocate(number))
        else:
            del live[number % len(live)]
        assert not overlap(live)
        assert tier.statistics().in_use == sum(buffer.nbytes for buffer in live)


def test_a_steady_step_asks_the_system_for_nothing() -> None:
    system = System()
    tier = HostMemory(system.allocate)
    for step in range(5):
        taken = [tier.allocate(n) for n in (1000, 70_000, 3000, SLAB_BYTES)]
        taken.clear()
        if step == 0:
            after_first = len(system.asked)
    assert len(system.asked) == after_first


def test_a_buffer_is_made_of_pieces_where_no_range_is_long_enough() -> None:
    system = System()
    tier = HostMemory(system.allocate)
    small = [tier.allocate(SLAB_BYTES // 4) for _ in range(4)]
    small = [small[1], small[3]]
    loan = tier.allocate(SLAB_BYTES // 2)
    split = loan.buffer
    assert len(split.pieces) == 2 and len(system.asked) == 1
    third = torch.Size((SLAB_BYTES // 6 // 64 * 64,))
    places = split.shaped([(third, torch.uint8)] * 3)
    assert [place.is_meta for _, place in places] == [False, True, False]
    values = torch.arange(SLAB_BYTES // 2).to(torch.uint8)
    at = 0
    for piece in split.pieces:
        piece.copy_(values[at : at + piece.numel()])
        at += piece.numel()
    for begin, place in places:
        part = split.bytes_at(begin, place.nbytes)
        assert torch.cat(part).equal(values[begin : begin + place.nbytes])
        assert place.is_meta or place.equal(part[0])
    assert not overlap([*small, loan])


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(1, 2 * SLAB_BYTES), min_size=1, max_size=8), max_size=6))
def test_memory_follows_the_largest_step(steps: list[list[int]]) -> None:
    tier = HostMemory(System().allocate)
    largest = 0
    for sizes in steps:
        taken = [tier.allocate(nbytes) for nbytes in sizes]
        assert not overlap(taken)
        largest = max(largest, sum(loan.buffer.room_bytes for loan in taken))
        granule = max(SLAB_BYTES, largest // FINENESS)
        assert tier.statistics().reserved < largest + 2 * granule
        del taken
        tier.compact()
        assert tier.statistics().reserved < largest + granule


def test_fitting_makes_few_large_slabs_and_then_nothing() -> None:
    system = System()
    tier = HostMemory(system.allocate)
    sizes = [3 * SLAB_BYTES] * 20
    for step in range(4):
        taken = [tier.allocate(nbytes) for nbytes in sizes]
        if step:
            assert sum(len(loan.buffer.pieces) > 1 for loan in taken) <= 3
        del taken
        tier.compact()
        if step == 0:
            after_first = len(system.asked)
    assert len(system.asked) == after_first
    assert tier.statistics().reserved == 60 * SLAB_BYTES


def test_fitting_waits_for_copies_but_not_for_buffers_in_use() -> None:
    system, event = System(), LateEvent()
    tier = HostMemory(system.allocate)
    first, second = tier.allocate(3 * SLAB_BYTES), tier.allocate(3 * SLAB_BYTES)
    del first
    tier.compact()
    assert len(system.asked) == 4
    second.buffer.last_use = event
    del second
    with pytest.raises(Unfinished) as unfinished:  # or the system would get what is still read
        tier.compact()
    assert unfinished.value.events == (event,)
    assert len(system.asked) == 4
    event.synchronize()
    tier.compact()
    assert len(system.asked) == 5
    assert tier.statistics().reserved == 6 * SLAB_BYTES


def test_memory_of_a_dropped_tier_is_free_for_others() -> None:
    shared = budget(4 * SLAB_BYTES)
    first, second = HostMemory(System().allocate, shared), HostMemory(System().allocate, shared)
    loan = first.allocate(3 * SLAB_BYTES)
    with pytest.raises(MemoryError, match="host_budget_bytes"):
        second.allocate(2 * SLAB_BYTES)
    del first
    with pytest.raises(MemoryError):
        second.allocate(2 * SLAB_BYTES)
    del loan
    assert second.allocate(2 * SLAB_BYTES).nbytes == 2 * SLAB_BYTES


def test_memory_that_cannot_be_pinned_in_one_piece_is_pinned_in_several() -> None:
    class PerCall(System):
        def allocate(self, nbytes: int) -> torch.Tensor:
            if nbytes > 2 * SLAB_BYTES:
                raise MemoryError("too long")
            return super().allocate(nbytes)

    system = PerCall()
    buffer = HostMemory(system.allocate).allocate(8 * SLAB_BYTES)
    assert system.asked == [2 * SLAB_BYTES] * 4
    assert buffer.nbytes == 8 * SLAB_BYTES


def test_memory_that_cannot_be_pinned_at_all_is_ordinary_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tier = HostMemory(System(limit_bytes=2 * SLAB_BYTES).allocate)
    taken = [tier.allocate(2 * SLAB_BYTES) for _ in range(3)]
    assert not overlap(taken)
    (record,) = caplog.records
    assert "pinned memory" in record.message and "ulimit -l" in record.message


def test_the_peak_counts_bytes_and_not_the_room_they_took() -> None:
    tier = HostMemory(System().allocate, budget(2**30))
    held = [tier.allocate(1), tier.allocate(1)]  # 1024 bytes of room
    held.clear()
    tier.allocate(1000)
    assert tier.statistics().peak == 1000


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), st.sampled_from([1, 700, 5000])), max_size=6))
def test_the_peak_is_exact_though_buffers_are_taken_back_bit_by_bit(
    steps: list[tuple[int, int]],
) -> None:
    tier = HostMemory(System().allocate)
    peak = peak_room = 0
    for num, nbytes in steps:
        held = [tier.allocate(nbytes) for _ in range(num)]
        peak = max(peak, sum(loan.nbytes for loan in held))
        peak_room = max(peak_room, sum(loan.buffer.room_bytes for loan in held))
        held.clear()
    assert tier._in_use.peak_room == peak_room
    assert tier.statistics().peak == peak


def test_a_take_does_not_pay_for_all_that_was_given_back() -> None:
    def lines(num_given_back: int) -> int:
        tier = HostMemory(System().allocate)
        held = [tier.allocate(1000) for _ in range(num_given_back)]
        held.clear()
        tier.compact()
        held = [tier.allocate(1000)]
        with interrupted(None) as lines:
            held.append(tier.allocate(1000))
        return lines.count

    assert lines(1000) == lines(100)


def test_fitting_asks_for_no_more_than_there_is() -> None:
    tier = HostMemory(System().allocate, budget(70000))
    tier.allocate(66000)
    reserved = tier.statistics().reserved
    tier.compact()
    assert tier.statistics().reserved <= reserved
    tier.allocate(66000)


def test_a_system_with_less_than_before_leaves_fewer_slabs() -> None:
    system = System()
    tier = HostMemory(system.allocate, budget(2**30))
    held = [tier.allocate(3 * SLAB_BYTES), tier.allocate(5 * SLAB_BYTES)]
    held.clear()
    system.limit_bytes = 0
    tier.compact()
    assert tier.statistics().reserved <= 8 * SLAB_BYTES


def test_idle_memory_goes_back_unless_a_buffer_is_in_use() -> None:
    system = System()
    tier = HostMemory(system.allocate, budget(2**30))
    held = tier.allocate(1000)
    tier.release_idle()
    assert tier.statistics().reserved > 0
    del held
    tier.release_idle()
    assert tier.statistics().reserved == 0
    tier.allocate(1000)
    assert len(system.asked) == 2


def test_whole_pieces_are_kept_by_fitting() -> None:
    system = System()
    tier = HostMemory(system.allocate, budget(64 * SLAB_BYTES), may_split=False)
    for _ in range(3):
        assert len(tier.allocate(33 * SLAB_BYTES).buffer.pieces) == 1
        tier.compact()
    assert system.asked == [64 * SLAB_BYTES]


def test_a_whole_piece_that_cannot_be_pinned_is_ordinary_memory() -> None:
    asked = []

    def allocate(nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        raise MemoryError("cannot pin")

    tier = HostMemory(allocate, budget(2**30), may_split=False)
    assert len(tier.allocate(3 * SLAB_BYTES).buffer.pieces) == 1
    assert asked == [4 * SLAB_BYTES], "in pieces it would be of no use"


def test_what_cannot_fit_is_not_asked_for() -> None:
    system = System()
    tier = HostMemory(system.allocate, budget(10 * SLAB_BYTES))
    with pytest.raises(MemoryError, match="over the budget.*raise host_budget_bytes"):
        tier.allocate(11 * SLAB_BYTES)
    assert not system.asked


def test_bytes_that_must_come_back_may_exceed_the_budget() -> None:
    tier = HostMemory(System().allocate, budget(SLAB_BYTES))
    held = tier.allocate(SLAB_BYTES)
    with pytest.raises(MemoryError):
        tier.allocate(SLAB_BYTES)
    assert not overlap([held, tier.allocate(SLAB_BYTES, force=True)])


def test_the_system_is_told_to_take_freed_memory_back() -> None:
    calls: list[int] = []
    tier = HostMemory(System().allocate, budget(2**30), trim=lambda: calls.append(1))
    tier.allocate(1000)
    tier.release_idle()
    assert calls


def lines_of_a_take(num_sizes: int) -> int:
    """Lines that run for 20 buffers of new sizes, behind others that nobody has any more."""
    tier = HostMemory(System().allocate)
    tier.allocate(2**22)
    for i in range(1, num_sizes):
        tier.allocate(512 * i)
    tier.allocate(2**22)
    with interrupted(None) as lines:
        for i in range(20):
            tier.allocate(512 * (2000 + i))
    assert tier._bins.num_sizes <= MAX_SIZES
    return lines.count


def test_what_a_take_costs_does_not_depend_on_the_sizes_ever_seen() -> None:
    assert lines_of_a_take(1000) == lines_of_a_take(10)


def test_what_a_take_costs_does_not_depend_on_how_many_buffers_wait() -> None:
    """All of them busy: only the longest unused are looked at before they are carved anew."""

    def lines(num_waiting: int) -> int:
        tier = HostMemory(System().allocate)
        held = [tier.allocate(512 * (1 + i % 100)) for i in range(num_waiting)]
        for loan in held:
            loan.buffer.last_use = LateEvent()
        del held, loan
        tier.statistics()
        with interrupted(None) as lines:
            tier.allocate(512 * 1000)
        return lines.count

    assert lines(4000) <= 2 * lines(400)


class AskedEvent(LateEvent):
    """Counts in a list how often any of them is asked."""

    def __init__(self, asked: list[int]) -> None:
        super().__init__()
        self.asked = asked

    def query(self) -> bool:
        self.asked[0] += 1
        return super().query()


def test_what_a_take_costs_does_not_depend_on_the_steps_before_it() -> None:
    """Of random sizes, whose copies do not end; each of them waits for those before it."""
    tier, draw, asked = HostMemory(System().allocate), random.Random(0), [0]

    def cost(num_steps: int) -> int:
        before = asked[0]
        with interrupted(None) as lines:
            for _ in range(num_steps):
                held = [tier.allocate(int(2 ** draw.uniform(10, 22))) for _ in range(16)]
                for loan in held:
                    loan.buffer.last_use, loan.buffer.before = AskedEvent(asked), ()
                del loan, held
        return lines.count + asked[0] - before

    cost(20)
    few = cost(20)
    cost(80)
    assert cost(20) <= 1.5 * few


def test_a_buffer_waits_for_the_uses_of_its_own_bytes_alone() -> None:
    tier = HostMemory(System().allocate, budget(2 * SLAB_BYTES))
    held = [tier.allocate(SLAB_BYTES) for _ in range(2)]
    events = {loan.buffer.pieces[0].data_ptr(): LateEvent() for loan in held}
    for loan in held:
        loan.buffer.last_use = events[loan.buffer.pieces[0].data_ptr()]
    del loan, held
    halves = [tier.allocate(SLAB_BYTES // 2) for _ in range(4)]
    for half in halves:
        (piece,) = half.buffer.pieces
        (slab,) = [at for at in events if 0 <= piece.data_ptr() - at < SLAB_BYTES]
        assert list(half.buffer.last_uses()) == [events[slab]]


def test_there_are_never_more_bins_than_may_be() -> None:
    event = LateEvent()
    tier = HostMemory(System().allocate)
    held = [tier.allocate(512 * (1 + i)) for i in range(3 * MAX_SIZES)]
    for loan in held:
        loan.buffer.last_use = event
    del held, loan
    assert tier.statistics().in_use == 0
    assert tier._bins.num_sizes == MAX_SIZES
    assert list(tier.allocate(512).buffer.last_uses()) == [event], "it was carved anew"
