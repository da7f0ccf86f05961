"""An interrupt at any line of the tiers loses no byte, and gives none to two owners."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from conftest import make_backend
from interrupts import every_line, interrupted, uninterrupted
from test_disk import disk_tier_of, staged_of, tickets_of
from test_disk_tier import read, some_bytes
from test_host_tier import LateEvent, System, budget, overlap, spans
from torch import Tensor

from pp_offload import OffloadConfig, PipelineOffloadManager, use_backend
from pp_offload._common.workers import Piece, Workers
from pp_offload._memory.budget import reserved_bytes
from pp_offload._memory.buffers import Loan
from pp_offload._memory.disk import ALIGNMENT, DiskEvent, DiskExtent, DiskFile
from pp_offload._memory.host import HostMemory
from pp_offload._memory.pool import GPUTensorPool
from pp_offload._memory.slabs import SMALLEST_BYTES as SLAB
from pp_offload._memory.unfinished import when_finished
from pp_offload._transfer.engine import TransferEngine
from pp_offload._transfer.ticket import Ticket, hand_over


class HostUser:
    """Takes and drops buffers, and knows which copies may still use what it dropped."""

    def __init__(self, *, may_split: bool) -> None:
        self.system = System()
        self.limit = 16 * SLAB
        self.tier = HostMemory(self.system.allocate, budget(self.limit), may_split=may_split)
        self.held: list[Loan] = []
        self.busy: list[tuple[int, int, LateEvent]] = []

    def take(self, nbytes: int) -> None:
        self.held.append(when_finished(nullcontext(), lambda: self.tier.allocate(nbytes)))

    def drop(self, index: int) -> None:
        """While a copy uses it."""
        event = LateEvent()
        with uninterrupted():
            loan = self.held.pop(index)
            loan.buffer.before = tuple(loan.buffer.last_uses())
            loan.buffer.last_use = event
            self.busy += [(*span, event) for span in spans(loan.buffer)]

    def drop_all(self) -> None:
        while self.held:
            self.drop(-1)

    def step(self) -> None:
        for sixteenths in (16, 4, 4, 4, 8):
            self.take(sixteenths * SLAB // 16)
        self.drop(1)
        self.drop(2)
        self.take(7 * SLAB // 16)
        self.tier.statistics()
        self.drop(0)
        self.take(2 * SLAB)
        self.take(SLAB // 4)
        self.drop_all()
        when_finished(nullcontext(), self.tier.compact)
        self.take(3 * SLAB)
        with pytest.raises(MemoryError):
            self.take(15 * SLAB)
        self.drop_all()
        when_finished(nullcontext(), self.tier.release_idle)
        self.take(SLAB)

    def check(self) -> None:
        """Who has what is what the tier says, and copies are waited for."""
        statistics = self.tier.statistics()
        assert statistics.in_use == sum(loan.nbytes for loan in self.held)
        assert statistics.num_buffers == statistics.num_payloads == len(self.held)
        assert not overlap(self.held)
        for loan in self.held:
            waits = list(loan.buffer.last_uses())
            for begin, end in spans(loan.buffer):
                for first, last, event in self.busy:
                    if begin <= last and first <= end:
                        assert event.has_passed or event in waits

    def check_that_nothing_is_lost(self) -> None:
        self.drop_all()
        assert self.tier.statistics().in_use == 0
        self.take(self.limit)
        self.drop_all()
        self.tier.close()
        assert all(event.has_passed for _, _, event in self.busy)


@pytest.mark.parametrize("may_split", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_host_tier_goes_on_after_an_interrupt_at_any_line(may_split: bool) -> None:
    gc.collect()
    before = reserved_bytes()
    HostUser(may_split=may_split).step()  # forgets what other tests reserved, so runs are alike
    numbers = every_line(HostUser(may_split=may_split).step)
    assert len(numbers) > 200
    for number in numbers:
        user = HostUser(may_split=may_split)
        with interrupted(number) as lines:
            user.step()
        assert lines.was_at or number > 0.9 * numbers[-1]
        user.check()
        user.drop_all()
        user.step()
        user.check()
        user.check_that_nothing_is_lost()
        del user
        assert reserved_bytes() == before, lines.was_at


@pytest.mark.parametrize("may_split", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_second_interrupt_while_the_books_are_made_anew(may_split: bool) -> None:
    numbers = every_line(HostUser(may_split=may_split).step)
    for number in numbers[:: len(numbers) // 40]:
        user = HostUser(may_split=may_split)
        with interrupted(number):
            user.step()
        for second in (1, 3, 5, 8, 13, 21, 34, 55):
            with interrupted(second):
                user.take(SLAB // 3)
            user.check()
        user.drop_all()
        user.step()
        user.check()
        user.check_that_nothing_is_lost()


class InTurn(Workers):
    """Works in the calling thread: at once, or when somebody waits; signals come elsewhere."""

    def __init__(self, *, is_late: bool) -> None:
        super().__init__("test")
        self.is_late = is_late
        self.queued: deque[Piece] = deque()

    def piece(self, work: Callable[[], object]) -> Piece:
        return PieceInTurn(work, self)

    def queue(self, piece: Piece) -> None:
        self.queued.append(piece)
        if not self.is_late:
            self.work()

    def work(self) -> None:
        with uninterrupted():
            while self.queued:
                self.queued.popleft().run()

    def shutdown(self) -> None:
        self.work()


class PieceInTurn(Piece):
    __slots__ = ("_in_turn",)

    def __init__(self, work: Callable[[], object], in_turn: InTurn) -> None:
        super().__init__(work)
        self._in_turn = in_turn

    def wait(self) -> None:
        if not self.done():
            self._in_turn.work()
        assert self.done(), "nobody will ever do it"


class DiskUser:
    """Writes and reads extents."""

    def __init__(self, directory: Path, *, is_late: bool) -> None:
        self.tier = DiskFile(directory)
        self.tier._threads = InTurn(is_late=is_late)
        self.data = [some_bytes(ALIGNMENT * 3 + seed, seed) for seed in range(4)]
        self.held: list[tuple[DiskExtent, int]] = []

    def write(self, index: int) -> None:
        extent = self.tier.allocate(self.data[index].numel())
        self.tier.write(extent, self.data[index])
        self.held.append((extent, index))

    def step(self) -> None:
        for index in range(4):
            self.write(index)
        del self.held[1]
        self.check()
        self.write(2)
        self.tier.statistics()
        del self.held[:2]
        self.write(3)

    def check(self) -> None:
        for extent, index in self.held:
            assert read(self.tier, extent).equal(self.data[index])
        self.tier._threads.work()  # type: ignore[attr-defined]
        statistics = self.tier.statistics()
        assert statistics.in_use == sum(extent.nbytes for extent, _ in self.held)
        assert statistics.num_payloads == len(self.held)
        assert self.tier._arena.statistics().num_live == len(self.held)


@pytest.mark.parametrize("is_late", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_disk_tier_goes_on_after_an_interrupt_at_any_line(tmp_path: Path, is_late: bool) -> None:
    numbers = every_line(DiskUser(tmp_path, is_late=is_late).step)
    assert len(numbers) > 100
    for number in numbers:
        user = DiskUser(tmp_path, is_late=is_late)
        with interrupted(number) as lines:
            user.step()
        assert lines.was_at
        user.check()
        user.step()
        user.check()
        user.held.clear()
        user.check()
        assert user.tier._arena.free_bytes == sum(user.tier._slabs), lines.was_at
        user.tier.close()


def test_an_event_that_was_interrupted_is_not_waited_for(tmp_path: Path) -> None:
    """Whoever uses the memory next waits for the event: it must end if nobody does the work."""
    data = some_bytes(5000)

    def write(tier: DiskFile, extent: DiskExtent, event: DiskEvent) -> None:
        tier.write(extent, data, event)

    tier = DiskFile(tmp_path)
    tier._threads = InTurn(is_late=True)
    first = tier.allocate(5000)
    for number in every_line(lambda: write(tier, first, DiskEvent())):
        extent, event = tier.allocate(5000), DiskEvent()
        with interrupted(number):
            write(tier, extent, event)
        event.synchronize()
        if extent.was_sent:
            assert read(tier, extent).equal(data)


def pool_step(pool: GPUTensorPool) -> None:
    held = [pool.allocate((n,)) for n in (100, 2000, 300)]
    pool.free(held.pop(0))
    held.append(pool.allocate((7,)))
    held.append(pool.allocate((SLAB,)))
    for tensor in held:
        pool.free(tensor)
    pool.allocate((50,))
    pool.reset()


def test_a_pool_goes_on_after_an_interrupt_at_any_line() -> None:
    for number in every_line(lambda: pool_step(GPUTensorPool("cpu"))):
        pool = GPUTensorPool("cpu")
        with interrupted(number) as lines:
            pool_step(pool)
        pool.reset()
        pool_step(pool)
        held = [pool.allocate((n,)) for n in (64, 5000, 300)]
        pieces = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in held)
        assert all(a[1] <= b[0] for a, b in zip(pieces, pieces[1:], strict=False))
        for tensor in held:
            pool.free(tensor)
        assert pool.get_pool_status()["allocated_count"] == 0
        live = sum(slab.arena.statistics().num_live for slab in pool._blocks)
        assert live == pool.get_pool_status()["free_count"], lines.was_at


def engine_step(engine: TransferEngine, seed: int = 0) -> None:
    """Two groups there and back, one of them ahead of its use; and one that nobody wants."""
    values = [torch.randn(n, generator=torch.Generator().manual_seed(seed)) for n in (900, 70, 900)]
    first, second, dropped = (tickets_of(engine, [v * k for v in values]) for k in (1.0, 2.0, 3.0))
    for tickets in (first, second, dropped):
        engine.offload(tickets)
    for ticket in (*first, *second, *dropped):
        hand_over([ticket])
    del tickets, dropped, ticket
    engine.reload(second, is_ahead=True)
    got = [engine.deliver(ticket) for ticket in (*second, *first)]
    expected = [*(v * 2.0 for v in values), *values]
    assert all(a.equal(b) for a, b in zip(got, expected, strict=True))
    del first, second
    engine.compact()


TIERS = [("host",), pytest.param(("disk",), marks=pytest.mark.slow)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
@pytest.mark.parametrize("kind", ["cpu", "late", "eager"])
def test_an_engine_goes_on_after_an_interrupt_at_any_line_of_its_tiers(
    kind: str, tiers: tuple[str, ...], tmp_path: Path
) -> None:
    """Each interrupted step comes behind those before it, in the same engine."""
    gc.collect()
    is_late = kind == "late"
    room = reserved_bytes() + (2**30 if tiers == ("host",) else 2**20)
    config = OffloadConfig(
        min_offloaded_tensor_size=1,
        tiers=tiers,
        disk_dir=tmp_path if "disk" in tiers else None,
        max_in_flight_bytes=9000,
        host_budget_bytes=room,
    )
    with use_backend(make_backend(kind), config=config) as manager:
        engine = manager.offloader.transfer
        if tier := disk_tier_of(engine):
            tier.disk._threads = InTurn(is_late=is_late)  # type: ignore[assignment]
        engine_step(engine)
        for number in every_line(lambda: engine_step(engine), num_visits=2):
            with interrupted(number) as lines:
                engine_step(engine, number)
            assert settled(manager) == (0, 0, 0, 0), lines.was_at
            engine_step(engine, number + 1)
            assert settled(manager) == (0, 0, 0, 0), lines.was_at


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["late", "eager"])
def test_what_was_offloaded_is_still_had_after_an_interrupt(kind: str, tmp_path: Path) -> None:
    """On its way to the disk or back: it is asked for again, and no buffer stays behind."""
    gc.collect()
    config = OffloadConfig(min_offloaded_tensor_size=1, tiers=("disk",), disk_dir=tmp_path)
    with use_backend(make_backend(kind), config=config) as manager:
        engine = manager.offloader.transfer
        tier = staged_of(engine)
        tier.disk._threads = threads = InTurn(is_late=True)
        values: list[Tensor] = []

        def offloaded(first: int = 0) -> list[Ticket]:
            values[:] = [torch.arange(first, first + n) * 1.0 for n in (900, 70, 300_000)]
            tickets = tickets_of(engine, values)
            engine.offload(tickets)
            return tickets

        def there_and_back(tickets: list[Ticket]) -> None:
            manager.backend.synchronize()
            engine.poll()
            threads.work()
            engine.poll()
            with uninterrupted():
                if tier.staging.statistics().in_use == 0:
                    for slab in tier.staging._slabs:  # or what was not read might be there still
                        slab.data.numpy()[:] = 0
            engine.reload(tickets[:2], is_ahead=True)
            for ticket in tickets:
                engine.deliver(ticket)

        tickets = offloaded()
        for number in every_line(lambda tickets=tickets: there_and_back(tickets)):
            tickets = offloaded(number)  # or a buffer may hold the same bytes from before
            with interrupted(number) as lines:
                there_and_back(tickets)
            for ticket, value in zip(tickets, values, strict=True):
                assert engine.deliver(ticket).equal(value), lines.was_at
            there_and_back(tickets)
            there_and_back(tickets)
            assert tier.staging.statistics().in_use == 0, lines.was_at


def settled(manager: PipelineOffloadManager) -> tuple[int, int, int, int]:
    """What is in use when all that was queued is done."""
    manager.backend.synchronize()
    engine = manager.offloader.transfer
    for _ in range(3):
        if tier := disk_tier_of(engine):
            tier.disk._threads.work()  # type: ignore[attr-defined]
        statistics = manager.statistics()
    return (
        statistics.host_bytes_in_use,
        statistics.disk_bytes_in_use,
        statistics.bytes_in_flight,
        statistics.bytes_reloaded_unused,
    )
