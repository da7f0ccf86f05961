"""Programs that come out wrong without one of the engine's waits, however fast a thread is.

In each one stream stands still at a closed gate. Where the wait is missing, the others run on as
far as they can before the gate is opened; with it, all is queued before.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from test_hazards import HeldStep, Owner
from torch import Tensor

from emulated.helpers import compute, some
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import OffloadConfig, OffloadError, use_backend
from pp_offload._memory.slabs import SMALLEST_BYTES as SLAB_BYTES
from pp_offload._transfer.engine import TransferEngine
from pp_offload._transfer.pending_reloads import MAX_ABANDONED
from pp_offload._transfer.plain_copies import PlainCopies
from pp_offload._transfer.ticket import PayloadTicket, SavedActivation, Ticket, hand_over
from pp_offload._transfer.tiers import make_engine
from pp_offload.backends import AcceleratorBackend, bare, default_backend

N = SLAB_BYTES // 4
"""Numbers that fill a slab, so that whoever needs another size has to carve it anew."""


@dataclass
class Program:
    """One run, with all waits or without one."""

    emulated: ModuleType
    waits: bool
    folder: Path

    @contextmanager
    def late(self, stream: Any, *others: Any) -> Iterator[Any]:
        """What is queued on ``stream`` comes behind all that ``others`` may do before it."""
        self.emulated.synchronize()
        with self.emulated.hold(stream) as gate:
            yield gate
            if not self.waits:
                for other in others:
                    other.synchronize()
        self.emulated.synchronize()

    def before_the_host_waits(self, late: Any) -> None:
        """What the host is about to wait for may go on, or nothing would."""
        if self.waits:
            (late.let_go if isinstance(late, HeldStep) else late.release)()

    def without_cached_memory(self) -> None:
        """What is allocated next is what is freed next."""
        gc.collect()
        self.emulated.empty_cache()


def engine_of(**options: Any) -> Any:
    """Its compute stream is the live one."""
    return make_engine(AcceleratorBackend(), OffloadConfig(**options))


def side_stream(engine: TransferEngine) -> torch.Stream:
    """One of the pool that is none of the copy streams."""
    taken = (bare(engine.backend.d2h), bare(engine.backend.h2d))
    return next(s for s in iter(lambda: torch.Stream(device="emulated"), None) if s not in taken)


def ticket_of(
    engine: TransferEngine, payload: Tensor, home: Any = None, *, is_part: bool = False
) -> Ticket:
    """Of a saved tensor, which is offloaded; only the ticket holds it."""
    saved = SavedActivation(payload, Owner(), home)
    storage = None if is_part else payload.untyped_storage()
    ticket = PayloadTicket(engine, "g", payload, [saved], storage)
    engine.offload([ticket])
    hand_over([ticket])
    return ticket


def away(engine: TransferEngine, given: Tensor) -> Ticket:
    """A ticket whose bytes are in host memory alone."""
    ticket = ticket_of(engine, given.to("emulated"))
    engine.backend.synchronize()
    engine.poll()
    return ticket


def brings(engine: TransferEngine, ticket: Ticket, given: Tensor) -> bool:
    """Whether a ticket whose copies were made has these bytes."""
    engine.backend.synchronize()
    engine.poll()
    return engine.deliver(ticket).cpu().equal(given)


def use_of_memory() -> Tensor:
    """A kernel on the live stream that gets memory of that size, so that what was freed is gone."""
    return torch.full((N,), 5.0, device="emulated")


# Copies to the host


def computed_late(on: Program) -> bool:
    engine, given = engine_of(), some(N)
    x = given.to("emulated")
    with on.late(compute(), engine.backend.d2h):
        ticket = ticket_of(engine, x * 2)
    return brings(engine, ticket, given * 2)


def computed_late_on_another_stream(on: Program) -> bool:
    engine, given = engine_of(), some(N)
    x, side = given.to("emulated"), side_stream(engine)
    with on.late(side, engine.backend.d2h):
        with side:
            y = x * 2
        ticket = ticket_of(engine, y, side)
    return brings(engine, ticket, given * 2)


def gathered_of_what_is_computed_late(on: Program) -> bool:
    engine, given = engine_of(), some(N).view(64, -1)
    x, side = given.to("emulated"), side_stream(engine)
    with on.late(side, compute()):
        with side:
            y = x * 2
        ticket = ticket_of(engine, y[:, :7], side, is_part=True)
    return brings(engine, ticket, (given * 2)[:, :7])


def gathered_late(on: Program) -> bool:
    """The other stream writes there again, and no version tells."""
    engine, given = engine_of(), some(N).view(64, -1)
    x, side = given.to("emulated"), side_stream(engine)
    with on.late(compute(), side):
        ticket = ticket_of(engine, x[:, :7], side, is_part=True)
        with side:
            x.data.fill_(7)
    return brings(engine, ticket, given[:, :7])


def source_let_go(on: Program) -> bool:
    engine, given = engine_of(), some(N)
    x = given.to("emulated")
    with on.late(engine.backend.d2h, compute()):
        ticket = ticket_of(engine, x)
        del x
        engine.poll()
        use_of_memory()
    return brings(engine, ticket, given)


def source_emptied(on: Program) -> bool:
    engine, given = engine_of(), some(N)
    x = given.to("emulated")
    with on.late(engine.backend.d2h, compute()):
        ticket = ticket_of(engine, x)
        engine.after_copies(lambda: x.untyped_storage().resize_(0))
        use_of_memory()
    try:
        return brings(engine, ticket, given)
    except OffloadError:  # it was emptied too early, and the engine has seen that
        return False


def too_much_in_flight(on: Program) -> bool:
    engine, given = engine_of(max_in_flight_bytes=0), some(N)
    x = given.to("emulated")
    with on.late(engine.backend.d2h, compute()):
        ticket = ticket_of(engine, x)
        del x
        use_of_memory()
    return brings(engine, ticket, given)


def too_much_in_flight_of_another_stream(on: Program) -> bool:
    engine, given = engine_of(max_in_flight_bytes=0), some(N)
    side = side_stream(engine)
    with side:
        x = given.to("emulated")
    engine.copies.in_flight.follow(side)
    with on.late(engine.backend.d2h, side):
        ticket = ticket_of(engine, x)
        del x
        with side:
            use_of_memory()
    return brings(engine, ticket, given)


def too_much_in_flight_of_a_stream_that_another_engine_saw(on: Program) -> bool:
    """Each engine has a backend of its own, as every product has by default."""
    return seen_by(engine_of(), engine_of(max_in_flight_bytes=0), on)


def too_much_in_flight_of_a_stream_that_another_kind_of_engine_saw(on: Program) -> bool:
    options = OffloadConfig(max_in_flight_bytes=0)
    return seen_by(engine_of(), make_engine(default_backend(), options), on)


def too_much_in_flight_of_a_stream_that_an_engine_saw_which_wraps_streams(on: Program) -> bool:
    other = make_engine(default_backend(), OffloadConfig())
    return seen_by(other, engine_of(max_in_flight_bytes=0), on)


def seen_by(other: TransferEngine, engine: TransferEngine, on: Program) -> bool:
    given, side = some(N), side_stream(engine)
    with side:
        x = given.to("emulated")
        other.copies.in_flight.follow(other.backend.current_stream())
    with on.late(bare(engine.backend.d2h), side):
        ticket = ticket_of(engine, x)
        del x
        with side:
            use_of_memory()
    return brings(engine, ticket, given)


def joined(on: Program) -> bool:
    engine, given = engine_of(), some(N)
    x = given.to("emulated")
    with on.late(engine.backend.d2h) as gate:
        ticket = ticket_of(engine, x)
        engine.copies.join()
        on.before_the_host_waits(gate)
        compute().synchronize()
        assert ticket.host_bytes is not None
        return ticket.host_bytes.equal(given)


# Host memory that is used again


def read_for_another_stream(on: Program, numel: int, between: Callable[[Any], None]) -> bool:
    """A buffer that a late copy reads for one compute stream is given to a forward on another."""
    engine, given = engine_of(), some(N)
    ticket, side = away(engine, given), side_stream(engine)
    place = ticket.host_bytes.data_ptr()
    x = some(numel).to("emulated")
    with on.late(engine.backend.h2d, side, engine.backend.d2h) as gate:
        result = engine.deliver(ticket) * 2
        del ticket
        between(SimpleNamespace(gate=gate, engine=engine))
        with side:
            again = ticket_of(engine, x)
    assert again.host_bytes.data_ptr() == place
    return result.cpu().equal(given * 2)


def buffer_read_for_another_stream(on: Program) -> bool:
    return read_for_another_stream(on, N, lambda _: None)


def forward_beside_a_backward(on: Program) -> bool:
    """The same, with groups: the next microbatch begins on a stream of its own."""
    config = OffloadConfig(min_offloaded_tensor_size=1)
    with use_backend(AcceleratorBackend(), config=config) as manager:
        engine, given = manager.wiring.transfer, some(N).requires_grad_()
        side = side_stream(engine)
        x, other = (t.detach().to("emulated").requires_grad_() for t in (given, some(N)))
        first = offloaded_sine(x)
        engine.backend.synchronize()
        engine.poll()
        with on.late(engine.backend.h2d, side, engine.backend.d2h):
            (result,) = torch.autograd.grad(first, x)
            del first
            with side:
                second = offloaded_sine(other)
        assert manager.statistics().bytes_offloaded == 2 * x.nbytes
        del second
    (expected,) = torch.autograd.grad((given * 2).sin().sum(), given)
    return result.cpu().equal(expected)


def offloaded_sine(x: Tensor) -> Tensor:
    """A forward with one group."""
    off_interface.init_chunk_handler(None, None, 1)
    h = x * 2
    with off_interface(True, h, "g"):
        y = h.sin()
    return off_interface.group_commit(y, name="g").sum()


def part_of_a_buffer_read_for_another_stream(on: Program) -> bool:
    return read_for_another_stream(on, N // 2, lambda _: None)


def slab_read_for_another_stream(on: Program) -> bool:
    def fit(it: SimpleNamespace) -> None:
        on.before_the_host_waits(it.gate)
        it.engine.compact()

    return read_for_another_stream(on, N, fit)


# Copies to the device


def brought_before_it_left(on: Program) -> bool:
    engine, given = engine_of(), some(N)
    x = given.to("emulated")
    with on.late(engine.backend.d2h, engine.backend.h2d):
        ticket = ticket_of(engine, x)
        engine.reload([ticket], is_ahead=True)
    return brings(engine, ticket, given)


def brought_into_memory_in_use(on: Program) -> bool:
    engine, given, others = engine_of(), some(N), some(N)
    ticket = away(engine, others)
    on.without_cached_memory()
    x = given.to("emulated")
    address = x.data_ptr()
    with on.late(compute(), engine.backend.h2d):
        result = x * 2
        del x
        engine.reload([ticket], is_ahead=True)
        target = ticket.device_tensor.data_ptr()
    assert target == address
    return result.cpu().equal(given * 2) and brings(engine, ticket, others)


def used_before_it_is_back(on: Program) -> bool:
    engine, given = engine_of(), some(N)
    ticket = away(engine, given)
    with on.late(engine.backend.h2d, compute()):
        result = engine.deliver(ticket) * 2
    return result.cpu().equal(given * 2)


def target_nobody_wants(on: Program) -> bool:
    engine = engine_of()
    ticket = away(engine, some(N))
    on.without_cached_memory()
    with on.late(engine.backend.h2d, compute()):
        engine.reload([ticket], is_ahead=True)
        del ticket
        engine.poll()
        result = use_of_memory()
    return bool(result.eq(5).all())


def targets_nobody_wants(on: Program) -> bool:
    """More than are kept without a wait."""
    engine = engine_of()
    tickets = [away(engine, some(N)) for _ in range(MAX_ABANDONED + 1)]
    x = some(N).to("emulated")
    on.without_cached_memory()
    with on.late(engine.backend.h2d, compute()):
        for ticket in tickets:
            engine.reload([ticket], is_ahead=True)
        del tickets, ticket
        again = ticket_of(engine, x)  # which looks how many there are
        result = use_of_memory()
    del again
    return bool(result.eq(5).all())


def engine_gone(on: Program) -> bool:
    """Its tier, which waits for the copies of its own memory, is still somebody's."""
    engine = engine_of()
    ticket, host, h2d = away(engine, some(N)), engine.tiers[0].host, engine.backend.h2d
    on.without_cached_memory()
    with on.late(h2d, compute()) as gate:
        engine.reload([ticket], is_ahead=True)
        on.before_the_host_waits(gate)
        del ticket, engine
        result = use_of_memory()
    del host
    return bool(result.eq(5).all())


def taken_back_on_another_stream(on: Program) -> bool:
    engine, given = engine_of(), some(N)
    x, side = given.to("emulated"), side_stream(engine)
    with on.late(side, compute()):
        with side:
            ticket = ticket_of(engine, x * 2)
        result = engine.deliver(ticket) * 2
    return result.cpu().equal(given * 4)


def landed_for_another_stream(on: Program) -> bool:
    return used_on_another_stream(on, is_used_twice=False)


def there_for_another_stream(on: Program) -> bool:
    return used_on_another_stream(on, is_used_twice=True)


def used_on_another_stream(on: Program, *, is_used_twice: bool) -> bool:
    """Brought for a side stream, which used it already or did not; used last on the live one."""
    engine, given = engine_of(), some(N)
    ticket, side = away(engine, given), side_stream(engine)
    with side:
        if is_used_twice:
            ticket.num_waiting = 2
            engine.deliver(ticket)
        else:
            engine.reload([ticket], is_ahead=True)
    with on.late(compute(), side):
        result = engine.deliver(ticket) * 2
        del ticket
        with side:
            use_of_memory()
    return result.cpu().equal(given * 2)


def same_bytes_landed_for_another_stream(on: Program) -> bool:
    engine, given = engine_of(), some(N)
    first, side = away(engine, given), side_stream(engine)
    first.num_waiting = 2
    again = SavedActivation(given.to("emulated"), Owner())
    second = PayloadTicket(engine, "g", again.held, [again], None)
    second.attach(first.block, first.begin, first.host_bytes)
    hand_over([second])
    with on.late(engine.backend.h2d, compute()):
        with side:
            engine.deliver(first)
        result = engine.deliver(second) * 2
    return result.cpu().equal(given * 2)


# Copies that the host waits for


def copies_of() -> PlainCopies:
    return PlainCopies(AcceleratorBackend(), OffloadConfig())


def plain_computed_late(on: Program) -> bool:
    copies, given = copies_of(), some(N)
    x = given.to("emulated")
    with on.late(compute(), copies.transfer.backend.d2h):
        pending = copies.copy_to_host([x * 2], "g")
    return copies.synchronize(pending)[0].equal(given * 2)


def plain_source_let_go(on: Program) -> bool:
    copies, given = copies_of(), some(N)
    x = given.to("emulated")
    with on.late(copies.transfer.backend.d2h, compute()):
        pending = copies.copy_to_host([x], "g")
        del x
        use_of_memory()
    return copies.synchronize(pending)[0].equal(given)


def plain_brought_into_memory_in_use(on: Program) -> bool:
    copies, given, source = copies_of(), some(N), some(N).pin_memory()
    on.without_cached_memory()
    x = given.to("emulated")
    address = x.data_ptr()
    with on.late(compute(), copies.transfer.backend.h2d):
        result = x * 2
        del x
        pending = copies.copy_to_device([source], "g")
        target = pending.tensors[0].data_ptr()
    assert target == address
    return result.cpu().equal(given * 2) and copies.synchronize(pending)[0].cpu().equal(source)


def plain_target_nobody_wants(on: Program) -> bool:
    copies, source = copies_of(), some(N).pin_memory()
    on.without_cached_memory()
    with on.late(copies.transfer.backend.h2d, compute()):
        copies.copy_to_device([source], "g")
        copies.poll()
        result = use_of_memory()
    return bool(result.eq(5).all())


def plain_copies_gone(on: Program) -> bool:
    copies, source = copies_of(), some(N).pin_memory()
    h2d = copies.transfer.backend.h2d
    on.without_cached_memory()
    with on.late(h2d, compute()) as gate:
        copies.copy_to_device([source], "g")
        on.before_the_host_waits(gate)
        del copies
        result = use_of_memory()
    return bool(result.eq(5).all())


def plain_read_by_the_host(on: Program) -> bool:
    copies, given = copies_of(), some(N)
    x = given.to("emulated")
    with on.late(copies.transfer.backend.d2h) as gate:
        pending = copies.copy_to_host([x], "g")
        on.before_the_host_waits(gate)
        return copies.synchronize(pending)[0].equal(given)


# The disk


def disk_engine(on: Program) -> TransferEngine:
    return engine_of(tiers=("disk",), disk_dir=on.folder, max_in_flight_bytes=2**30)


def on_disk(engine: TransferEngine, given: Tensor) -> Ticket:
    """A ticket whose bytes are on disk alone."""
    ticket = away(engine, given)
    extent = ticket.block.extent
    extent.last_use.synchronize()
    engine.poll()
    assert ticket.block.buffer is None
    return ticket


def read_ahead(engine: TransferEngine, ticket: Ticket) -> Any:
    """It was read, and the copy to the device is queued; the staging buffer is anybody's."""
    engine.reload([ticket], is_ahead=True)
    buffer = ticket.block.buffer
    ticket.block.reading.synchronize()
    engine.poll()
    assert ticket.device_tensor is not None and ticket.block.buffer is None
    return buffer


def written_before_it_arrived(on: Program) -> bool:
    engine, given = disk_engine(on), some(N)
    x = given.to("emulated")
    with on.late(engine.backend.d2h):
        ticket = ticket_of(engine, x)
        if not on.waits:
            ticket.block.extent.last_use.synchronize()
    engine.poll()
    return brings(engine, ticket, given)


def staged_while_the_copy_back_reads(on: Program) -> bool:
    """All of it on one compute stream, which has not waited for the copy: it was read ahead."""
    engine, given = disk_engine(on), some(N)
    ticket, x = on_disk(engine, given), some(N).to("emulated")
    with on.late(engine.backend.h2d, engine.backend.d2h):
        buffer = read_ahead(engine, ticket)
        again = ticket_of(engine, x)
        is_same_buffer = again.block.buffer is buffer
    assert is_same_buffer
    return brings(engine, ticket, given)


def staged_while_a_thread_reads_into_it(on: Program) -> bool:
    engine, given = disk_engine(on), some(N)
    ticket, x = on_disk(engine, some(N)), given.to("emulated")
    engine.tiers[0].disk._pread = read = HeldStep(engine.tiers[0].disk._pread)  # type: ignore[method-assign]
    try:
        with on.late(engine.backend.d2h):
            engine.reload([ticket], is_ahead=True)
            reading = ticket.block.reading
            del ticket
            on.before_the_host_waits(read)
            again = ticket_of(engine, x)
        read.let_go()
        reading.synchronize()
        return brings(engine, again, given)
    finally:
        read.let_go()


def read_while_the_copy_back_reads(on: Program) -> bool:
    engine, given, others = disk_engine(on), some(N), some(N)
    first, second = on_disk(engine, given), on_disk(engine, others)
    with on.late(engine.backend.h2d):
        buffer = read_ahead(engine, first)
        engine.reload([second], is_ahead=True)
        is_same_buffer = second.block.buffer is buffer
        if not on.waits:
            second.block.reading.synchronize()
    assert is_same_buffer
    second.block.reading.synchronize()
    return brings(engine, first, given) and brings(engine, second, others)


def brought_before_it_was_read(on: Program) -> bool:
    engine, given = disk_engine(on), some(N)
    ticket = on_disk(engine, given)
    on_disk(engine, some(N))  # whose bytes are left in the buffer
    engine.tiers[0].disk._pread = read = HeldStep(engine.tiers[0].disk._pread)  # type: ignore[method-assign]
    try:
        engine.reload([ticket], is_ahead=True)
        on.before_the_host_waits(read)
        result = engine.deliver(ticket).cpu()
    finally:
        read.let_go()
    return result.equal(given)
