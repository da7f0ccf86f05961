"""The window: earliest needed first, and never more bytes reloaded and unused than it holds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pp_offload._groups.prefetch import Prefetcher, Step
from pp_offload._memory.host import HostMemory
from pp_offload._transfer.tiers import host_engine

from pp_offload._core.group import Group
from pp_offload._core.saved import Saved as SavedActivation
from pp_offload._core.saved import Ticket
from pp_offload._groups.chunk import Chunk
from pp_offload._groups.offloader import Offloader
from pp_offload.backends import CpuBackend
from pp_offload.config import AUTO


class Backwards(Step):
    """Groups of one chunk, the last first."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.begun: list[Group] = []

    def after(self, group: Group) -> Iterator[Group]:
        return iter(self.groups[: self.groups.index(group)][::-1])

    def begin(self, group: Group) -> None:
        self.begun.append(group)


class Bench:
    """A chunk whose groups are offloaded, and what its prefetcher has reloaded.

    Args:
        sizes: Per group in forward order, the sizes of its tensors in bytes.
        window_bytes: Of the prefetcher.
    """

    def __init__(self, sizes: list[list[int]], window_bytes: int | str) -> None:
        backend = CpuBackend()
        self.transfer = host_engine(backend, HostMemory(backend.allocate_host), 2**30)
        self.step = Backwards()
        self.prefetcher = Prefetcher(self.transfer, self.step, window_bytes)
        # Its step has no place for a chunk, and is not the one that says what comes next.
        offloader = Offloader(self.transfer, Offloader(self.transfer), Step(), self.prefetcher)
        chunk = Chunk(1, offloader)
        self.saved: list[list[SavedActivation]] = []
        for position, row in enumerate(sizes):
            group = chunk.start(f"g{position}")
            tags = [chunk.pack(group, torch.full((n,), n % 251, dtype=torch.uint8)) for n in row]
            assert all(isinstance(tag, SavedActivation) for tag in tags)
            self.saved.append(tags)  # type: ignore[arg-type]
            chunk.commit(f"g{position}")
        self.step.groups = chunk.groups

    @property
    def groups(self) -> list[Group]:
        return self.step.groups

    def backward_order(self) -> list[Ticket]:
        """All tickets, those needed first first."""
        refs = [ref for group in reversed(self.groups) for ref in reversed(group._tickets)]
        return [ticket for ref in refs if (ticket := ref()) is not None]

    def on_device(self) -> list[Ticket]:
        return [ticket for ticket in self.backward_order() if ticket.device_tensor is not None]

    def check(self, window_bytes: int) -> None:
        """The invariants of the window, now."""
        on_device = self.on_device()
        assert self.transfer.reloads.nbytes == sum(ticket.nbytes for ticket in on_device)
        assert self.transfer.reloads.nbytes <= window_bytes or len(on_device) == 1
        needed = [ticket for ticket in self.backward_order() if ticket.num_waiting > 0]
        assert on_device == needed[: len(on_device)]


sizes = st.lists(st.lists(st.integers(1, 40), max_size=4), min_size=1, max_size=6)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(sizes, st.integers(0, 120))
def test_the_window_holds_through_a_whole_backward(
    sizes: list[list[int]], window_bytes: int
) -> None:
    bench = Bench(sizes, window_bytes)
    for group, tags in zip(reversed(bench.groups), reversed(bench.saved), strict=True):
        group.on_use()
        bench.check(window_bytes)
        for tag in reversed(tags):
            tensor = tag.unpack()
            assert tensor.eq(tensor.numel() % 251).all()
            bench.check(window_bytes)
    assert bench.transfer.reloads.nbytes == 0
    assert bench.transfer.counters.bytes_reloaded == sum(map(sum, sizes))


@settings(deadline=None)
@given(sizes, st.integers(0, 120), st.randoms(use_true_random=False))
def test_any_order_of_use_gives_the_right_bytes_once_each(
    sizes: list[list[int]], window_bytes: int, random: object
) -> None:
    bench = Bench(sizes, window_bytes)
    tags = [tag for row in bench.saved for tag in row]
    random.shuffle(tags)  # type: ignore[attr-defined]
    largest = max((n for row in sizes for n in row), default=0)
    for tag in tags:
        tensor = tag.unpack()
        assert tensor.eq(tensor.numel() % 251).all()
        assert bench.transfer.reloads.nbytes <= max(window_bytes, largest)
    assert bench.transfer.reloads.nbytes == 0
    assert bench.transfer.counters.bytes_reloaded == sum(map(sum, sizes))


def test_the_next_groups_are_reloaded_the_earliest_needed_first() -> None:
    bench = Bench([[10], [10], [10], [10]], 30)
    bench.groups[3].on_use()
    assert bench.on_device() == bench.backward_order()[:3]


def test_within_a_group_the_tensor_saved_last_comes_first() -> None:
    bench = Bench([[10, 11, 12]], 25)
    bench.groups[0].on_use()
    assert [ticket.nbytes for ticket in bench.on_device()] == [12, 11]


def test_a_tensor_that_does_not_fit_is_not_overtaken_by_a_smaller_one() -> None:
    bench = Bench([[1], [100], [10]], 50)
    bench.groups[2].on_use()
    assert [ticket.nbytes for ticket in bench.on_device()] == [10]


def test_one_tensor_may_be_ahead_however_large() -> None:
    bench = Bench([[5], [1000]], 1)
    bench.groups[1].on_use()
    assert [ticket.nbytes for ticket in bench.on_device()] == [1000]
    bench.saved[1][0].unpack()
    bench.groups[0].on_use()
    assert [ticket.nbytes for ticket in bench.on_device()] == [5]


def test_the_window_is_filled_again_when_half_of_it_was_used() -> None:
    bench = Bench([[10], [10], [10], [10], [10, 10]], 40)
    bench.groups[4].on_use()
    assert len(bench.on_device()) == 4
    bench.saved[4][1].unpack()
    bench.saved[4][0].unpack()
    bench.groups[3].on_use()
    bench.check(40)
    assert len(bench.on_device()) == 4


def test_room_that_the_last_tensor_of_a_group_made_is_used_at_once() -> None:
    bench = Bench([[10], [10], [10]], 10)
    bench.groups[2].on_use()
    bench.saved[2][0].unpack()
    assert bench.on_device() == bench.backward_order()[1:2]
    assert bench.transfer.counters.prefetched_reloads == 1


def test_a_group_approached_is_reloaded_before_its_use() -> None:
    bench = Bench([[10], [10]], 15)
    bench.prefetcher.approach(bench.groups[1])
    assert bench.on_device() == bench.backward_order()[:1]
    assert bench.step.begun == []
    bench.groups[1].on_use()
    assert bench.step.begun == [bench.groups[1]]
    assert bench.transfer.counters.on_demand_reloads == 0


def test_backward_begins_each_group_once() -> None:
    bench = Bench([[10], [10]], 100)
    for _ in range(2):
        bench.groups[1].on_use()
        bench.groups[0].on_use()
    assert bench.step.begun == [bench.groups[1], bench.groups[0]]


def test_reloads_are_counted_as_on_demand_or_prefetched() -> None:
    bench = Bench([[10], [10], [10]], 100)
    bench.groups[2].on_use()
    assert bench.transfer.counters.on_demand_reloads == 1
    assert bench.transfer.counters.prefetched_reloads == 2


def test_a_group_autograd_let_go_of_is_not_reloaded() -> None:
    bench = Bench([[10], [10]], 100)
    bench.saved[0].clear()
    bench.groups[1].on_use()
    assert bench.transfer.counters.bytes_reloaded == 10


def test_fill_before_any_use_does_nothing() -> None:
    bench = Bench([[10]], 100)
    bench.prefetcher.fill()
    assert bench.on_device() == []


def test_a_window_of_no_said_size_holds_two_of_the_largest_group() -> None:
    bench = Bench([[2**20], [2**20], [2**20]], AUTO)
    bench.transfer.backend.synchronize()
    bench.transfer.poll()  # what is used now is had back without a copy until its copy was made
    bench.groups[2].on_use()
    assert bench.on_device() == bench.backward_order()[:2]


def test_after_reset_it_has_no_place_in_the_step() -> None:
    bench = Bench([[10], [10]], 10)
    bench.groups[1].on_use()
    bench.saved[1].clear()
    bench.transfer.poll()  # the window is empty, so it would be filled
    bench.prefetcher.reset()
    bench.prefetcher.fill()
    assert bench.on_device() == []


@pytest.mark.parametrize("window_bytes", [0, 10, 1000])
def test_a_tensor_used_twice_is_brought_again(window_bytes: int) -> None:
    bench = Bench([[10], [20]], window_bytes)
    for _ in range(2):
        for group, tags in zip(reversed(bench.groups), reversed(bench.saved), strict=True):
            group.on_use()
            assert tags[0].unpack().eq(tags[0].unpack()).all()
    assert bench.transfer.reloads.nbytes == 0
