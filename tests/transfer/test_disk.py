"""Steps through the disk: the same numbers on every backend, whatever the disk does."""

from __future__ import annotations

import errno
import gc
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import BACKENDS, make_backend
from pp_offload._memory.buffers import Loan
from pp_offload._memory.disk import NUM_THREADS, DiskFile
from pp_offload._transfer.block import Block, BlockState
from pp_offload._transfer.copies import Copies
from pp_offload._transfer.disk_direct import DirectDisk
from pp_offload._transfer.disk_staged import StagedDisk
from pp_offload._transfer.engine import TransferEngine
from pp_offload._transfer.listeners import Listener
from pp_offload._transfer.on_disk import DiskBlock
from pp_offload._transfer.ticket import PayloadTicket, Ticket
from torch import Tensor
from toy import assert_idle, batches, make_model, run_step, same_bits

from pp_offload import (
    DiskTierError,
    OffloadConfig,
    PipelineOffloadManager,
    RaceError,
    SavedTensorModifiedError,
    use_backend,
)
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload._memory.budget import reserved_bytes
from pp_offload.backends import Event, Stream

on_backends = pytest.mark.parametrize("kind", BACKENDS)
WIDTH = 32


@contextmanager
def disk_manager(
    kind: str,
    directory: Path,
    *,
    tiers: tuple[str, ...] = ("disk",),
    max_in_flight_bytes: int = 40_000,
    host_budget_bytes: int | None = None,
) -> Iterator[PipelineOffloadManager]:
    """So little may be in flight that bytes really come to rest on disk."""
    config = OffloadConfig(
        min_offloaded_tensor_size=1,
        tiers=tiers,
        disk_dir=directory,
        max_in_flight_bytes=max_in_flight_bytes,
        host_budget_bytes=host_budget_bytes,
    )
    torch.manual_seed(0)
    with use_backend(make_backend(kind), config=config) as manager:
        yield manager


class LateThreads:
    """Does what it was given only when somebody waits for it, and all that was given before."""

    def __init__(self) -> None:
        self.queued: deque[LatePiece] = deque()

    def piece(self, work: Callable[[], object]) -> LatePiece:
        return LatePiece(self, work)

    def queue(self, piece: LatePiece) -> None:
        self.queued.append(piece)

    def submit(self, work: Callable[[], object]) -> LatePiece:
        piece = self.piece(work)
        self.queue(piece)
        return piece

    def shutdown(self) -> None:
        while self.queued:
            self.queued.popleft().run()


class EagerThreads(LateThreads):
    """Does it at once."""

    def queue(self, piece: LatePiece) -> None:
        piece.run()


class LatePiece:
    """A piece of work."""

    def __init__(self, threads: LateThreads, work: Callable[[], object]) -> None:
        self._threads, self._work = threads, work
        self._is_done = False

    def run(self) -> None:
        if not self._is_done:
            self._value, self._is_done = self._work(), True
            del self._work  # it may refer to what should go

    def done(self) -> bool:
        return self._is_done

    def result(self) -> object:
        while not self._is_done:
            self._threads.queued.popleft().run()
        return self._value


THREADS = {"late": LateThreads, "eager": EagerThreads}


def disk_of(manager: PipelineOffloadManager) -> DiskFile:
    tier = disk_tier_of(manager.offloader.transfer)
    assert tier is not None
    return tier.disk


def disk_tier_of(engine: TransferEngine) -> DirectDisk | StagedDisk | None:
    """The last one, if it is one on disk."""
    tier = engine.tiers[-1]
    return tier if isinstance(tier, DirectDisk | StagedDisk) else None


def staged_of(engine: TransferEngine) -> StagedDisk:
    tier = disk_tier_of(engine)
    assert isinstance(tier, StagedDisk)
    return tier


def steps_are_equal(
    manager: PipelineOffloadManager, steps: Sequence[int] = range(4), length: int = 9
) -> bool:
    """Steps of changing length, against the same without offload."""
    device = str(manager.backend.device)
    on = make_model(width=WIDTH, device=device)
    off = make_model(width=WIDTH, groups=(), device=device)
    for step in steps:
        inputs = [x.to(device) for x in batches(5, WIDTH, step, length=length + step)]
        got = run_step(on, inputs, in_flight=3)
        if not same_bits(got, run_step(off, inputs, in_flight=3, offload=False)):
            return False
    return True


def saved_in_a_group(manager: PipelineOffloadManager) -> tuple[Tensor, Tensor, Tensor]:
    """A leaf, what a group saved of it, and a loss."""
    x = torch.linspace(-1, 1, 40).to(manager.backend.device).requires_grad_()
    manager.init_model_chunk_offload_handler(None, None, 1)
    h = x * 1
    with off_interface(True, h, "g"):
        y = h.sin()
    return x, h, off_interface.group_commit(y, name="g").sum()


def expected_for(x: Tensor) -> Sequence[Tensor]:
    """The gradient of that loss, without a group."""
    return torch.autograd.grad((x * 1).sin().sum(), x)


@contextmanager
def threads_that_wait(manager: PipelineOffloadManager) -> Iterator[None]:
    """The disk's threads do nothing until the end, however it comes."""
    gate = threading.Event()
    for _ in range(NUM_THREADS):
        disk_of(manager)._threads.submit(gate.wait)
    try:
        yield
    finally:
        gate.set()


def tickets_of(engine: TransferEngine, values: Sequence[Tensor]) -> list[Ticket]:
    """One for each, which will be asked for once."""
    members: Any = (SimpleNamespace(held=torch.ones(1), version=0, stream=None, inside=None),)
    return [PayloadTicket(engine, "g", v, members, v.untyped_storage()) for v in values]


@pytest.mark.covering(1)
@on_backends
@pytest.mark.parametrize("order", ["threads", "late", "eager"])
def test_steps_are_equal_bit_for_bit(kind: str, order: str, tmp_path: Path) -> None:
    with disk_manager(kind, tmp_path) as manager:
        if order in THREADS:
            disk_of(manager)._threads = THREADS[order]()
        assert steps_are_equal(manager)
        statistics = manager.statistics()
        assert statistics.disk_bytes_written > 0
        assert statistics.disk_bytes_read > 0
        assert statistics.disk_bytes_peak > 0
        assert statistics.disk_bytes_in_use == 0
        assert statistics.bytes_in_flight == 0
        assert_idle(manager)


@on_backends
@pytest.mark.parametrize("budget", [0, 2**19])
def test_the_disk_takes_what_is_over_the_host_budget(
    kind: str, tmp_path: Path, budget: int
) -> None:
    """Half a MiB holds seven groups of 64 KiB and one more on its way; twelve are alive."""
    gc.collect()
    limit = reserved_bytes() + budget
    with disk_manager(
        kind, tmp_path, tiers=("host", "disk"), host_budget_bytes=limit, max_in_flight_bytes=70_000
    ) as manager:
        assert steps_are_equal(manager, length=95)
        statistics = manager.statistics()
        assert reserved_bytes() <= limit
        assert (statistics.host_bytes_peak > 0) == (budget > 0)
        if budget or manager.backend.is_host:
            assert statistics.disk_bytes_written > 0
            assert statistics.disk_bytes_read > 0
        else:
            assert statistics.bytes_offloaded == 0, "there is no memory to pass through"
        assert_idle(manager)


@on_backends
def test_a_full_disk_keeps_tensors_and_warns_once(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with disk_manager(kind, tmp_path) as manager:
        disk = disk_of(manager)
        written, room = disk._pwrite, [60_000]

        def write(fd: int, data: memoryview, offset: int) -> int:
            if len(data) > room[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            room[0] -= len(data)
            return written(fd, data, offset)

        disk._pwrite = write  # type: ignore[method-assign]
        with caplog.at_level(logging.WARNING, logger="pp_offload"):
            assert steps_are_equal(manager)
        said = [record.getMessage() for record in caplog.records]
        assert sum("could not be written" in message for message in said) == 1
        assert any(os.strerror(errno.ENOSPC) in message for message in said)
        assert len(said) <= 2, "one for the disk, one for the first group that stays"
        before = manager.statistics().disk_bytes_in_use
        assert before == 0
        room[0] = 10**9  # somebody made room: the next step uses it
        disk_bytes = manager.statistics().disk_bytes_written
        assert steps_are_equal(manager)
        assert manager.statistics().disk_bytes_written > disk_bytes
        assert_idle(manager)


class Opens(Listener):
    """A gate, when payloads are asked for."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def reloads_queued(self, num: int, *, is_ahead: bool) -> None:
        if num:
            self.gate.set()


@pytest.mark.parametrize("kind", ["cpu", "cpu threads"])
def test_what_was_not_written_is_had_back_though_it_was_asked_for_before(
    kind: str, tmp_path: Path
) -> None:
    """A read is queued behind a write that fails then."""
    with disk_manager(kind, tmp_path, max_in_flight_bytes=10**9) as manager:
        opens = Opens()
        manager.offloader.transfer.listeners.add(opens)

        def write(fd: int, data: memoryview, offset: int) -> int:
            assert opens.gate.wait(60)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        disk_of(manager)._pwrite = write  # type: ignore[method-assign]
        assert steps_are_equal(manager, [0])
        assert_idle(manager)


@on_backends
def test_what_cannot_be_read_raises_and_the_next_step_works(kind: str, tmp_path: Path) -> None:
    with disk_manager(kind, tmp_path) as manager:
        assert steps_are_equal(manager, [0])
        disk = disk_of(manager)

        def read(fd: int, into: memoryview, offset: int) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        disk._pread = read  # type: ignore[method-assign]
        with pytest.raises(DiskTierError, match=os.strerror(errno.EIO)) as error:
            steps_are_equal(manager, [1, 2, 3])
        assert str(tmp_path) in str(error.value)
        assert "offset" in str(error.value)
        del disk._pread, error
        gc.collect()
        manager.reset()
        assert steps_are_equal(manager)
        assert_idle(manager)


@on_backends
def test_what_could_not_be_read_once_is_read_again(kind: str, tmp_path: Path) -> None:
    with disk_manager(kind, tmp_path, max_in_flight_bytes=0) as manager:
        x, h, loss = saved_in_a_group(manager)
        del h
        manager.backend.synchronize()
        disk = disk_of(manager)
        settle(manager)

        def read(fd: int, into: memoryview, offset: int) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        disk._pread = read  # type: ignore[method-assign]
        for _ in range(2):
            with pytest.raises(DiskTierError, match="Input/output"):
                torch.autograd.grad(loss, x, retain_graph=True)
        del disk._pread
        (got,) = torch.autograd.grad(loss, x)
        assert same_bits([got], expected_for(x))


def settle(manager: PipelineOffloadManager) -> None:
    """Until everything queued is on disk."""
    manager.statistics()  # sends on what has arrived
    disk = disk_of(manager)
    disk._threads.submit(lambda: None).result()
    while manager.statistics().bytes_in_flight or manager.statistics().host_bytes_in_use:
        pass


@on_backends
def test_a_flipped_bit_is_never_a_gradient(kind: str, tmp_path: Path) -> None:
    with disk_manager(kind, tmp_path) as manager:
        disk = disk_of(manager)
        written = disk._pwrite

        def write(fd: int, data: memoryview, offset: int) -> int:
            changed = bytearray(data)
            changed[len(changed) // 2] ^= 1
            return written(fd, memoryview(changed), offset)

        disk._pwrite = write  # type: ignore[method-assign]
        with pytest.raises(DiskTierError, match="checksum"):
            steps_are_equal(manager)
        disk._pwrite = written  # type: ignore[method-assign]
        assert steps_are_equal(manager)


@on_backends
def test_changed_while_it_waits_to_be_written(kind: str, tmp_path: Path) -> None:
    """A thread that has not written yet: the change must not reach the gradient."""
    with disk_manager(kind, tmp_path, max_in_flight_bytes=10**9) as manager:
        try:
            with threads_that_wait(manager):
                x, h, loss = saved_in_a_group(manager)
                h.mul_(2)
            (got,) = torch.autograd.grad(loss, x)
        except (SavedTensorModifiedError, RaceError) as error:
            assert "'g'" in str(error)
        else:
            assert same_bits([got], expected_for(x))


@on_backends
def test_what_is_being_written_is_had_back_at_once(kind: str, tmp_path: Path) -> None:
    """Backward need not wait for threads that have not begun: the bytes are still in memory."""
    with disk_manager(kind, tmp_path, max_in_flight_bytes=10**9) as manager:
        with threads_that_wait(manager):
            x, _, loss = saved_in_a_group(manager)
            assert same_bits(torch.autograd.grad(loss, x), expected_for(x))
        assert manager.statistics().disk_bytes_read == 0


def test_a_directory_that_cannot_be_used_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = OffloadConfig(tiers=("disk",), disk_dir=tmp_path / "file")
    with pytest.raises(DiskTierError, match="file': it is a file; set disk_dir to a directory"):
        PipelineOffloadManager(config=config, backend=make_backend("cpu"))
    with pytest.raises(DiskTierError, match="null byte; set disk_dir to a directory"):
        DiskFile("a\0b")


@pytest.mark.parametrize(
    ("kind", "tiers", "advice"),
    [
        ("late", ("host",), 'tiers=("host", "disk")'),
        ("cpu", ("host",), 'tiers=("host", "disk")'),
        ("late", ("host", "disk"), "passes through host memory"),
        ("late", ("disk",), "passes through host memory"),
    ],
)
def test_over_budget_the_advice_is_nothing_that_is_set(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    tiers: tuple[str, ...],
    advice: str,
) -> None:
    config = OffloadConfig(
        min_offloaded_tensor_size=1,
        tiers=tiers,
        disk_dir=tmp_path if "disk" in tiers else None,
        host_budget_bytes=0,
    )
    with use_backend(make_backend(kind), config=config), caplog.at_level(logging.WARNING):
        run_step(make_model(), batches(2))
    said = [one.getMessage() for one in caplog.records if "over the budget" in one.getMessage()]
    assert len(said) == 1
    assert "raise host_budget_bytes" in said[0]
    assert advice in said[0]
    assert ("tiers=" in said[0]) == (tiers == ("host",))


class WritesBeforeItArrived(StagedDisk):
    def store(self, tickets: Sequence[Ticket], blocks: Sequence[Block]) -> int:
        nbytes = super().store(tickets, blocks)
        for ticket in tickets:
            self._write(DiskBlock.of(ticket))
        return nbytes


class TakesBuffersStillReadInto(StagedDisk):
    def _stage(self, nbytes: int) -> Loan:
        loan = self.staging.allocate(nbytes)
        loan.buffer.last_use, loan.buffer.before = None, ()
        return loan


class SendsOnBeforeItWasRead(StagedDisk):
    def _finish_reading(self, block: DiskBlock) -> None:
        block.state = BlockState.READ


class UsesBeforeItWasRead(Copies):
    def _compute_waits_for(self, stream: Stream, event: Event) -> None:
        pass


STAGED_FAULTS = [WritesBeforeItArrived, TakesBuffersStillReadInto, SendsOnBeforeItWasRead]


def is_caught(kind: str, directory: Path, fault: type | None) -> bool:
    """Whether steps with late threads go wrong in a way that shows."""
    try:
        with disk_manager(kind, directory, max_in_flight_bytes=3000) as manager:
            disk_of(manager)._threads = LateThreads()  # type: ignore[assignment]
            if fault is not None:
                engine = manager.offloader.transfer
                part: Any = engine.copies if issubclass(fault, Copies) else engine.tiers[0]
                part.__class__ = fault
            return not all(is_right_after_half_a_backward(manager, step) for step in range(3))
    except (RaceError, DiskTierError):
        return True


def is_right_after_half_a_backward(manager: PipelineOffloadManager, step: int) -> bool:
    """A step, behind a backward that stops half way: what was read ahead is never used."""
    model = make_model(width=WIDTH)
    off_interface.reset()
    off_interface.init_chunk_handler(None, None, 1)
    x = batches(1, WIDTH, step)[0].requires_grad_()
    middle = model[1](model[0](x))
    torch.autograd.grad(model[2](middle).sum(), middle)
    del middle
    return steps_are_equal(manager, [step])


@pytest.mark.parametrize("fault", STAGED_FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_on_the_way_through_staging_is_caught(fault: type, tmp_path: Path) -> None:
    assert is_caught("late", tmp_path, fault)


def test_a_fault_on_the_direct_way_is_caught(tmp_path: Path) -> None:
    assert is_caught("cpu", tmp_path, UsesBeforeItWasRead)


@pytest.mark.parametrize("kind", ["cpu", "late", "eager", "random"])
def test_without_a_fault_nothing_is_caught(kind: str, tmp_path: Path) -> None:
    assert not is_caught(kind, tmp_path, None)


def test_more_reads_than_room_to_stage_them(tmp_path: Path) -> None:
    """One batch of a copy still being written, and one at rest that needs its buffer."""
    with disk_manager("eager", tmp_path, max_in_flight_bytes=2**21) as manager:
        engine = manager.offloader.transfer
        tier = staged_of(engine)
        values = [torch.full((2**21 // 4,), float(i)) for i in range(2)]
        tickets = tickets_of(engine, values)
        engine.offload(tickets[:1])
        settle(manager)
        tier.disk._threads = LateThreads()  # type: ignore[assignment]
        engine.offload(tickets[1:])
        engine.reload([tickets[1], tickets[0]])
        assert all(torch.equal(engine.deliver(t), v) for t, v in zip(tickets, values, strict=True))
        assert manager.statistics().bytes_reloaded_unused == 0


def at_rest(manager: PipelineOffloadManager, *values: Tensor) -> list[Ticket]:
    """Tickets of bytes that are on disk alone, one offloaded after the other."""
    engine = manager.offloader.transfer
    tickets = tickets_of(engine, values)
    for ticket in tickets:
        engine.offload([ticket])
        manager.backend.synchronize()
        settle(manager)
    return tickets


def test_a_buffer_is_read_into_when_its_last_copy_was_made(tmp_path: Path) -> None:
    """That copy is late; the next group is read into the same buffer."""
    with disk_manager("late", tmp_path) as manager:
        engine = manager.offloader.transfer
        tier = staged_of(engine)
        values = [torch.full((2**20,), float(i)) for i in range(2)]
        tickets = at_rest(manager, *values)
        tier.disk._threads = EagerThreads()  # type: ignore[assignment]
        for ticket in tickets:
            engine.reload([ticket], is_ahead=True)
            engine.poll()  # it was read, and is copied from there
        assert tier.staging.statistics().num_allocations == 1
        assert all(torch.equal(engine.deliver(t), v) for t, v in zip(tickets, values, strict=True))


def test_what_was_read_is_sent_on_though_an_interrupt_came_before(tmp_path: Path) -> None:
    with disk_manager("eager", tmp_path) as manager:
        engine = manager.offloader.transfer
        tier: Any = staged_of(engine)
        (ticket,) = at_rest(manager, torch.ones(2**20))
        tier.disk._threads = EagerThreads()

        def cut_off(block: DiskBlock, asked: Sequence[Ticket]) -> int:
            del tier._send
            raise KeyboardInterrupt

        tier._send = cut_off
        with pytest.raises(KeyboardInterrupt):
            engine.reload([ticket], is_ahead=True)
            engine.poll()
        assert ticket.block.state is BlockState.READ
        engine.poll()
        assert ticket.block.state is BlockState.ON_DISK and ticket.device_tensor is not None
        assert not tier.is_bringing and tier.staging.statistics().in_use == 0


def test_a_buffer_is_read_into_when_it_was_copied_into_for_nothing(tmp_path: Path) -> None:
    """Nobody wants what a late copy brings into it; the thread that reads waits for that copy."""
    with disk_manager("late", tmp_path) as manager:
        engine = manager.offloader.transfer
        value = torch.ones(2**20)
        (ticket,) = at_rest(manager, value)
        engine.offload(tickets_of(engine, [torch.zeros(2**20)]))
        gc.collect()
        engine.reload([ticket], is_ahead=True)
        assert ticket.block.state is BlockState.READING, "it is read ahead"
        DiskBlock.of(ticket).reading.synchronize()
        staged_of(engine).poll()  # no one else has asked whether that copy was made
        assert staged_of(engine).staging.statistics().num_allocations == 1
        assert torch.equal(engine.deliver(ticket), value)


def test_a_buffer_is_copied_into_when_no_thread_writes_it(tmp_path: Path) -> None:
    """Nobody wants any more what a thread reads into it; the next group is copied there."""
    with disk_manager("eager", tmp_path) as manager:
        engine = manager.offloader.transfer
        tier = staged_of(engine)
        dropped = at_rest(manager, torch.zeros(2**20))
        tier.disk._threads = threads = LateThreads()  # type: ignore[assignment]
        engine.reload(dropped, is_ahead=True)
        del dropped
        value = torch.ones(2**20)
        (ticket,) = tickets_of(engine, [value])
        engine.offload([ticket])
        assert tier.staging.statistics().num_allocations == 1
        threads.shutdown()
        engine.poll()
        assert ticket.block.state is BlockState.ON_DISK
        assert torch.equal(engine.deliver(ticket), value)


def test_a_small_payload_brings_what_shares_its_extent(tmp_path: Path) -> None:
    with disk_manager("eager", tmp_path) as manager:
        engine = manager.offloader.transfer
        values = [torch.full((100,), float(i)) for i in range(16)]
        tickets = tickets_of(engine, values)
        engine.offload(tickets)
        settle(manager)
        for ticket, value in zip(tickets, values, strict=True):
            assert torch.equal(engine.deliver(ticket), value)
        once = manager.statistics()
        assert once.disk_bytes_read == once.disk_bytes_written
        assert once.bytes_reloaded_unused == 0


@pytest.mark.parametrize("is_dropped", [False, True])
def test_read_ahead_for_a_ticket_that_shares_another_one_s_copy(
    tmp_path: Path, is_dropped: bool
) -> None:
    """What saved it first is gone; what saved it later is asked for, or gone as well."""
    with disk_manager("eager", tmp_path) as manager:
        engine = manager.offloader.transfer
        value = torch.arange(5000.0)
        first, later = tickets_of(engine, [value, value])
        engine.offload([first])
        block, place = first.block, first.host_bytes
        later.attach(block, first.begin, place)
        settle(manager)
        del first
        engine.reload([later], is_ahead=True)
        if is_dropped:
            del later
            settle(manager)
        else:
            assert torch.equal(engine.deliver(later), value)
        assert manager.statistics().on_demand_reloads == 0
        assert manager.statistics().disk_bytes_read == value.nbytes
        assert manager.statistics().bytes_reloaded_unused == 0


def test_a_read_that_ends_while_it_is_asked_for_lands_once(tmp_path: Path) -> None:
    with disk_manager("eager", tmp_path) as manager:
        engine = manager.offloader.transfer
        tier = staged_of(engine)
        value = torch.arange(5000.0)
        (ticket,) = tickets_of(engine, [value])
        engine.offload([ticket])
        settle(manager)
        tier.disk._threads = threads = LateThreads()  # type: ignore[assignment]
        engine.reload([ticket], is_ahead=True)
        assert ticket.reload is not None and ticket.device_tensor is None
        poll, polls = engine.poll, []

        def poll_late() -> None:
            polls.append(1)
            if len(polls) == 2:  # the read ends between the first look and the second
                while threads.queued:
                    threads.queued.popleft().run()
            poll()

        engine.poll = poll_late  # type: ignore[method-assign]
        assert torch.equal(engine.deliver(ticket), value)
        assert manager.statistics().disk_bytes_read == value.nbytes
        assert manager.statistics().bytes_reloaded_unused == 0


@pytest.mark.parametrize("kind", ["cpu", "eager"])
@pytest.mark.parametrize("error", [MemoryError("none"), ValueError("odd")], ids=repr)
def test_any_failure_of_a_writer_keeps_the_tensor(
    kind: str, error: Exception, tmp_path: Path
) -> None:
    with disk_manager(kind, tmp_path) as manager:

        def write(fd: int, data: memoryview, offset: int) -> int:
            raise error

        disk_of(manager)._pwrite = write  # type: ignore[method-assign]
        assert steps_are_equal(manager)


def test_managers_that_go_leave_no_thread_and_no_file(tmp_path: Path) -> None:
    gc.collect()
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        for _ in range(20):
            with disk_manager("cpu", tmp_path) as manager:
                assert steps_are_equal(manager, [0])
            del manager
    finally:
        gc.enable()
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= files


def test_a_group_larger_than_the_room_to_stage_it_is_streamed(tmp_path: Path) -> None:
    with disk_manager("eager", tmp_path, max_in_flight_bytes=2**21) as manager:
        engine = manager.offloader.transfer
        values = [torch.full((2**20 // 4,), float(i)) for i in range(12)]
        tickets = tickets_of(engine, values)
        assert engine.offload(tickets) == 12 * 2**20
        assert manager.statistics().host_bytes_peak <= 2**21
        for ticket, value in zip(tickets, values, strict=True):
            assert torch.equal(engine.deliver(ticket), value)
        assert manager.statistics().host_bytes_peak <= 2**21


def test_idle_staging_memory_makes_room_for_a_larger_piece(tmp_path: Path) -> None:
    gc.collect()
    limit = reserved_bytes() + 2**22
    with disk_manager(
        "eager", tmp_path, max_in_flight_bytes=2**30, host_budget_bytes=limit
    ) as manager:
        engine = manager.offloader.transfer
        values = [torch.full((mib * 2**20 // 4,), float(mib)) for mib in (1, 1, 1, 1, 3)]
        tickets = tickets_of(engine, values)
        engine.offload(tickets)
        assert reserved_bytes() <= limit
        for ticket, value in zip(tickets, values, strict=True):
            assert torch.equal(engine.deliver(ticket), value)
        assert reserved_bytes() <= limit
