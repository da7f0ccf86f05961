"""Programs that come out wrong without one of the engine's waits, however fast a thread is.

In each, one stream stands still at a closed gate. Where the wait is missing, the others run on as
far as they can before the gate is opened; with it, all is queued before.

    engine = engine_of()
    (saved,) = saved_by(engine, x)      # one group, which has left
    saved.unpack()                      # what autograd asks for
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from lines import Line
from torch import Tensor

from emulated.helpers import compute, some
from pp_offload import OffloadConfig, OffloadError
from pp_offload._core.engine import Engine
from pp_offload._core.group import Group
from pp_offload._core.saved import Saved
from pp_offload._core.stopwatch import Laps
from pp_offload._groups.chunk import Chunk
from pp_offload._groups.offloader import Offloader
from pp_offload._memory.host_pool import MIN_SLAB_BYTES
from pp_offload._slices.plain_copies import PlainCopies
from pp_offload.backends import AcceleratorBackend

N = MIN_SLAB_BYTES // 4
"""Numbers that fill a slab, so that memory for another size has to be carved of the same bytes."""


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

    def before_the_host_waits(self, gate: Any) -> None:
        """What the host is about to wait for may go on, or nothing would."""
        if self.waits:
            gate.release()

    def without_cached_memory(self) -> None:
        """What is allocated next is what is freed next."""
        gc.collect()
        self.emulated.empty_cache()


def engine_of(**options: Any) -> Engine:
    """An engine of which no other is left over, that might have seen the same streams."""
    gc.collect()
    return Line(AcceleratorBackend(), **options).engine


def wiring_of(**options: Any) -> Offloader:
    """What chunks share."""
    gc.collect()
    config = OffloadConfig(min_offloaded_tensor_size=1, **options)
    return Offloader(AcceleratorBackend(), config)


def side_stream(engine: Engine) -> torch.Stream:
    """One of the pool that is none of the copy streams."""
    taken = (engine.mover.backend.d2h, engine.mover.backend.h2d)
    return next(s for s in iter(lambda: torch.Stream(device="emulated"), None) if s not in taken)


def saved_by(engine: Engine, *tensors: Tensor, on: Any = None) -> list[Saved]:
    """Tensors that a group saved on a stream, the live one or ``on``; it is committed here."""
    group = Group("g", engine=engine, min_numel=1)
    engine.follow(engine.current_stream())
    with on or nullcontext():
        saved = [group.pack(tensor) for tensor in tensors]
    engine.send(group, engine.payloads(group))
    assert all([isinstance(one, Saved) and one.tensor is None for one in saved])
    return saved  # type: ignore[return-value]


def away(engine: Engine, given: Tensor, num_uses: int = 1) -> list[Saved]:
    """Saved tensors whose bytes are in host memory alone."""
    saved = saved_by(engine, *[given.to("emulated")] * num_uses)
    engine.mover.synchronize()
    return saved


def bring_ahead(engine: Engine, saved: Saved) -> Tensor:
    """Queue a reload that nobody has asked for; its target."""
    with engine.mover.lock:
        engine.mover.reload([(saved.batch, [saved.index])])
    target = saved.batch.back.device[saved.index]
    assert target is not None
    return target.view_as(target)


def brings(engine: Engine, saved: Saved, given: Tensor) -> bool:
    """Whether a saved tensor whose copies have run has these bytes."""
    engine.mover.synchronize()
    return saved.unpack().cpu().equal(given)


def use_of_memory() -> Tensor:
    """A kernel on the live stream that gets memory of that size, so that what was freed is gone."""
    return torch.full((N,), 5.0, device="emulated")


def is_used(memory: Tensor) -> bool:
    """Whether that kernel's numbers are there."""
    return bool(memory.eq(5).all())


# Copies to the host


def computed_late(on: Program) -> bool:
    engine, given = engine_of(), some(N)
    x = given.to("emulated")
    with on.late(compute(), engine.mover.backend.d2h):
        (saved,) = saved_by(engine, x * 2)
    return brings(engine, saved, given * 2)


def computed_late_on_another_stream(on: Program) -> bool:
    engine, given = engine_of(), some(N)
    x, side = given.to("emulated"), side_stream(engine)
    with on.late(side, engine.mover.backend.d2h):
        with side:
            y = x * 2
        (saved,) = saved_by(engine, y, on=side)
    return brings(engine, saved, given * 2)


def gathered_of_what_is_computed_late(on: Program) -> bool:
    engine, given = engine_of(), some(N).view(64, -1)
    x, side = given.to("emulated"), side_stream(engine)
    with on.late(side, compute()):
        with side:
            y = x * 2
        (saved,) = saved_by(engine, y[:, :700], on=side)
    return brings(engine, saved, (given * 2)[:, :700])


def gathered_late(on: Program) -> bool:
    """The other stream writes there again, and no version tells."""
    engine, given = engine_of(), some(N).view(64, -1)
    x, side = given.to("emulated"), side_stream(engine)
    with on.late(compute(), side):
        (saved,) = saved_by(engine, x[:, :700], on=side)
        with side:
            x.data.fill_(7)
    return brings(engine, saved, given[:, :700])


def source_let_go(on: Program) -> bool:
    engine, given = engine_of(), some(N)
    x = given.to("emulated")
    with on.late(engine.mover.backend.d2h, compute()):
        (saved,) = saved_by(engine, x)
        del x
        engine.mover.poll()
        use_of_memory()
    return brings(engine, saved, given)


def gathered_source_let_go(on: Program) -> bool:
    engine, given = engine_of(), some(N).view(64, -1)
    x = given.to("emulated")
    with on.late(engine.mover.backend.d2h, compute()):
        (saved,) = saved_by(engine, x[:, :700])
        use_of_memory()
    return brings(engine, saved, given[:, :700])


def source_emptied(on: Program) -> bool:
    engine, given = engine_of(), some(N)
    x = given.to("emulated")
    with on.late(engine.mover.backend.d2h, compute()):
        (saved,) = saved_by(engine, x)
        engine.mover.after_copies(lambda: x.untyped_storage().resize_(0))
        use_of_memory()
    try:
        return brings(engine, saved, given)
    except OffloadError:  # it was emptied too early, and the engine has seen that
        return False


def too_much_in_flight(on: Program) -> bool:
    engine, given = engine_of(max_in_flight_bytes=0), some(N)
    x = given.to("emulated")
    with on.late(engine.mover.backend.d2h, compute()):
        (saved,) = saved_by(engine, x)
        del x
        use_of_memory()
    return brings(engine, saved, given)


def too_much_in_flight_of_another_stream(on: Program) -> bool:
    """What it saved there goes back to it."""
    engine, given = engine_of(max_in_flight_bytes=0), some(N)
    side = side_stream(engine)
    with side:
        x = given.to("emulated")
    with on.late(engine.mover.backend.d2h, side):
        (saved,) = saved_by(engine, x, on=side)
        del x
        with side:
            use_of_memory()
    return brings(engine, saved, given)


def too_much_in_flight_of_a_stream_where_the_chunk_began(on: Program) -> bool:
    """It saves nothing there: what it computes there is saved on the live stream."""

    def begin(offloader: Offloader, side: torch.Stream) -> Chunk:
        with side:
            return Chunk(1, offloader)

    return saved_in_a_chunk(on, begin)


def too_much_in_flight_of_a_stream_where_a_group_began(on: Program) -> bool:
    def begin(offloader: Offloader, side: torch.Stream) -> Chunk:
        chunk = Chunk(1, offloader)
        with side:
            chunk.start("on the other stream")
        return chunk

    return saved_in_a_chunk(on, begin)


def saved_in_a_chunk(on: Program, begin: Callable[[Offloader, torch.Stream], Chunk]) -> bool:
    offloader, given = wiring_of(max_in_flight_bytes=0), some(N)
    side = side_stream(offloader.engine)
    chunk = begin(offloader, side)
    with side:
        x = given.to("emulated")
    saved = chunk.start("g").pack(x)
    assert isinstance(saved, Saved)
    with on.late(offloader.backend.d2h, side):
        chunk.commit("g")
        del x
        with side:
            use_of_memory()
    return brings(offloader.engine, saved, given)


def too_much_in_flight_of_a_stream_that_another_engine_saw(on: Program) -> bool:
    """Each engine has a backend of its own, as every product has by default."""
    other, engine = engine_of(), engine_of(max_in_flight_bytes=0)
    given, side = some(N), side_stream(engine)
    with side:
        x = given.to("emulated")
        other.follow(other.current_stream())
    with on.late(engine.mover.backend.d2h, side):
        (saved,) = saved_by(engine, x)
        del x
        with side:
            use_of_memory()
    return brings(engine, saved, given)


def joined(on: Program) -> bool:
    engine, given = engine_of(), some(N)
    x = given.to("emulated")
    with on.late(engine.mover.backend.d2h) as gate:
        (saved,) = saved_by(engine, x)
        engine.mover.join()
        on.before_the_host_waits(gate)
        compute().synchronize()
        return saved.batch.place.tensors[saved.index].equal(given)


# Host memory that is used again


def read_for_another_stream(
    on: Program,
    numel: int,
    next_numel: int,
    between: Callable[[Engine], object] = lambda engine: None,
) -> bool:
    """Memory that a late copy reads for one compute stream is given to a forward on another."""
    engine, given = engine_of(), some(numel)
    (saved,), side = away(engine, given), side_stream(engine)
    rest = away(engine, some(N - numel)) if numel < N else []  # of the same slab
    place = saved.batch.place.tensors[0].data_ptr()
    x = some(next_numel).to("emulated")
    with on.late(engine.mover.backend.h2d, side, engine.mover.backend.d2h):
        result = saved.unpack() * 2
        del saved
        between(engine)
        with side:
            (again,) = saved_by(engine, x)
    assert again.batch.place.tensors[0].data_ptr() == place
    del rest
    return result.cpu().equal(given * 2)


def buffer_read_for_another_stream(on: Program) -> bool:
    return read_for_another_stream(on, N, N)


def buffer_that_an_owner_did_not_use(on: Program) -> bool:
    """As one whose gather runs out of memory."""

    def own(engine: Engine) -> None:
        class Owner:
            pass

        engine.mover.tier.take(Owner(), [4 * N], [(torch.Size([N]), torch.float)])

    return read_for_another_stream(on, N, N, own)


def part_of_a_buffer_read_for_another_stream(on: Program) -> bool:
    return read_for_another_stream(on, N, N // 2)


def slab_read_for_another_stream(on: Program) -> bool:
    """Between phases, twice; what is in use keeps the slab."""

    def trim(engine: Engine) -> None:
        pool = engine.mover.tier.pool  # type: ignore[attr-defined]
        pool.trim()
        pool.trim()

    return read_for_another_stream(on, N // 2, N // 2, trim)


def forward_beside_a_backward(on: Program) -> bool:
    """The next microbatch begins on a stream of its own."""
    gc.collect()
    line = Line(AcceleratorBackend())
    backend, given = line.engine.mover.backend, some(N).requires_grad_()
    side = side_stream(line.engine)
    x, other = (t.detach().to("emulated").requires_grad_() for t in (given, some(N)))

    def forward(x: Tensor) -> Tensor:
        with line.chunk():
            return line.group("g", torch.sin, x * 2).sum()  # type: ignore[no-any-return]

    first = forward(x)
    line.engine.mover.synchronize()
    with on.late(backend.h2d, side, backend.d2h):
        (result,) = torch.autograd.grad(first, x)
        del first
        with side:
            second = forward(other)
    assert line.engine.mover.counts.bytes_offloaded == 2 * x.nbytes
    del second
    (expected,) = torch.autograd.grad((given * 2).sin().sum(), given)
    return result.cpu().equal(expected)


# Copies to the device


def brought_before_it_left(on: Program) -> bool:
    """For another stream, which may not take the source back."""
    engine, given = engine_of(), some(N)
    x, side = given.to("emulated"), side_stream(engine)
    with on.late(engine.mover.backend.d2h, engine.mover.backend.h2d):
        (saved,) = saved_by(engine, x)
        with side:
            result = saved.unpack()
    return result.cpu().equal(given)


def brought_into_memory_in_use(on: Program) -> bool:
    engine, given, others = engine_of(), some(N), some(N)
    (saved,) = away(engine, others)
    on.without_cached_memory()
    x = given.to("emulated")
    address = x.data_ptr()
    with on.late(compute(), engine.mover.backend.h2d):
        result = x * 2
        del x
        target = bring_ahead(engine, saved)
    assert target.data_ptr() == address
    return result.cpu().equal(given * 2) and brings(engine, saved, others)


def used_before_it_is_back(on: Program) -> bool:
    engine, given = engine_of(), some(N)
    (saved,) = away(engine, given)
    with on.late(engine.mover.backend.h2d, compute()):
        bring_ahead(engine, saved)
        result = saved.unpack() * 2
    return result.cpu().equal(given * 2)


def used_before_it_is_back_and_timed(on: Program) -> bool:
    engine, given = engine_of(), some(N)
    laps = Laps.started(engine.mover.backend)
    assert laps is not None
    engine.mover.observers.add(laps)
    (saved,) = away(engine, given)
    with on.late(engine.mover.backend.h2d, compute()):
        result = saved.unpack() * 2
    return result.cpu().equal(given * 2) and len(laps.waits) == 1


def target_nobody_wants(on: Program) -> bool:
    """Its graph is part of a cycle, in which no weak reference calls anybody."""
    engine = engine_of()
    (saved,) = away(engine, some(N))
    on.without_cached_memory()
    with on.late(engine.mover.backend.h2d, compute()):
        bring_ahead(engine, saved)
        cycle: list[object] = [saved]
        cycle.append(cycle)
        del saved, cycle
        gc.collect()
        engine.mover.poll()
        result = use_of_memory()
    return is_used(result)


def target_of_another_stream(on: Program) -> bool:
    """It was brought for one that does not ask for it."""
    engine = engine_of()
    (saved,), side = away(engine, some(N)), side_stream(engine)
    on.without_cached_memory()
    with on.late(engine.mover.backend.h2d, side):
        with side:
            bring_ahead(engine, saved)
        saved.unpack()
        with side:
            result = use_of_memory()
    return is_used(result)


def target_that_a_part_of_backward_does_not_use(on: Program) -> bool:
    engine = engine_of()
    (saved,) = away(engine, some(N))
    on.without_cached_memory()
    with on.late(engine.mover.backend.h2d, compute()):
        bring_ahead(engine, saved)
        with engine.mover.lock:
            engine.mover.arrived.expect_uses(saved.batch.back, [0])
        result = use_of_memory()
    return is_used(result)


def engine_gone(on: Program) -> bool:
    engine = engine_of()
    (saved,), h2d = away(engine, some(N)), engine.mover.backend.h2d
    on.without_cached_memory()
    with on.late(h2d, compute()) as gate:
        bring_ahead(engine, saved)
        on.before_the_host_waits(gate)
        del saved, engine
        gc.collect()
        result = use_of_memory()
    return is_used(result)


def engine_torn(on: Program) -> bool:
    """A signal's exception comes when the copy is queued, and before anybody knows its event."""
    offloader = wiring_of()
    backend, chunk = offloader.backend, Chunk(1, offloader)
    saved = chunk.start("g").pack(some(N).to("emulated"))
    chunk.commit("g")
    offloader.engine.mover.synchronize()
    on.without_cached_memory()

    def cut_off(*copy: Any) -> None:
        AcceleratorBackend.copy(backend, *copy)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with on.late(backend.h2d, compute()) as gate:
        with mock.patch.object(backend, "copy", cut_off), suppress(KeyboardInterrupt):
            saved.unpack()
        on.before_the_host_waits(gate)
        offloader.renew_if_torn()
        del saved, chunk
        gc.collect()
        offloader.settle()  # which ends the torn engine
        result = use_of_memory()
    return is_used(result)


def taken_back_on_another_stream(on: Program) -> bool:
    engine, given = engine_of(), some(N)
    x, side = given.to("emulated"), side_stream(engine)
    with on.late(side, compute()):
        with side:
            (saved,) = saved_by(engine, x * 2)
        result = saved.unpack() * 2
    return result.cpu().equal(given * 4)


def landed_for_another_stream(on: Program) -> bool:
    """It was brought for a side stream, and is used on the live one alone."""
    engine, given = engine_of(), some(N)
    (saved,), side = away(engine, given), side_stream(engine)
    with side:
        bring_ahead(engine, saved)
    with on.late(compute(), side):
        result = saved.unpack() * 2
        del saved
        with side:
            use_of_memory()
    return result.cpu().equal(given * 2)


def there_for_another_stream(on: Program) -> bool:
    """A side stream used it, and has a use left."""
    engine, given = engine_of(), some(N)
    (first, second), side = away(engine, given, num_uses=2), side_stream(engine)
    with side:
        first.unpack()
    with on.late(compute(), side):
        result = second.unpack() * 2
        del first, second
        with side:
            use_of_memory()
    return result.cpu().equal(given * 2)


def used_up_by_another_stream(on: Program) -> bool:
    """A side stream used it up, and what it got lives."""
    engine, given = engine_of(), some(N)
    (saved,), side = away(engine, given), side_stream(engine)
    with side:
        got = saved.unpack()
    with on.late(compute(), side):
        result = saved.unpack() * 2
        del got, saved
        with side:
            use_of_memory()
    return result.cpu().equal(given * 2)


# The disk


class Held:
    """A system call that waits until it is let go."""

    def __init__(self, step: Callable[..., int]) -> None:
        self._step, self._is_free = step, threading.Event()

    def __call__(self, *args: Any) -> int:
        self._is_free.wait()
        return self._step(*args)

    def release(self) -> None:
        self._is_free.set()


@contextmanager
def held(engine: Engine, name: str) -> Iterator[Held]:
    """What threads read, or write, stands still before it is let go or this is left."""
    disk = engine.mover.tier.disk
    step = Held(getattr(disk, name))
    setattr(disk, name, step)
    try:
        yield step
    finally:
        step.release()


def disk_engine(on: Program) -> Engine:
    return wiring_of(tiers=("disk",), disk_dir=on.folder, max_in_flight_bytes=2**30).engine


def on_disk(engine: Engine, given: Tensor) -> list[Saved]:
    """One whose bytes are on disk alone."""
    saved = away(engine, given)
    saved[0].batch.write.event.synchronize()
    engine.mover.poll()
    assert saved[0].batch.place is None
    return saved


def begin_to_read(engine: Engine, saved: Saved) -> Any:
    """Have a thread read ahead of backward."""
    bring_ahead(engine, saved)
    reload = saved.batch.back.reloads[saved.index]
    assert reload is not None
    return reload.read


def read_ahead(engine: Engine, saved: Saved) -> int:
    """It was read, and the copy to the device is queued; its host memory is anybody's."""
    read = begin_to_read(engine, saved)
    address: int = read.passage.host.tensors[0].data_ptr()
    read.event.synchronize()
    engine.mover.poll()
    return address


def written_before_it_arrived(on: Program) -> bool:
    engine, given = disk_engine(on), some(N)
    x = given.to("emulated")
    with on.late(engine.mover.backend.d2h):
        (saved,) = saved_by(engine, x)
        written = saved.batch.write.event
        if not on.waits:
            written.synchronize()
    written.synchronize()
    return brings(engine, saved, given)


def staged_before_it_was_written(on: Program) -> bool:
    """The next group would go through the same host memory."""
    engine, given = disk_engine(on), some(N)
    with held(engine, "_pwrite"):
        (saved,) = away(engine, given)
        (again,) = away(engine, some(N))
    for one in (saved, again):
        one.batch.write.event.synchronize()
    return brings(engine, saved, given)


def staged_while_the_copy_back_reads(on: Program) -> bool:
    """All of it on one compute stream, which has not waited for the copy: it was read ahead."""
    engine, given = disk_engine(on), some(N)
    (saved,), x = on_disk(engine, given), some(N).to("emulated")
    with on.late(engine.mover.backend.h2d, engine.mover.backend.d2h):
        address = read_ahead(engine, saved)
        (again,) = saved_by(engine, x)
        assert again.batch.place.tensors[0].data_ptr() == address
    return brings(engine, saved, given)


def read_while_the_copy_back_reads(on: Program) -> bool:
    engine, given, others = disk_engine(on), some(N), some(N)
    (first,), (second,) = on_disk(engine, given), on_disk(engine, others)
    with on.late(engine.mover.backend.h2d):
        address = read_ahead(engine, first)
        read = begin_to_read(engine, second)
        assert read.passage.host.tensors[0].data_ptr() == address
        if not on.waits:
            read.event.synchronize()
    read.event.synchronize()
    return brings(engine, first, given) and brings(engine, second, others)


def staged_while_a_thread_reads_into_it(on: Program) -> bool:
    """What the thread reads is for nobody any more."""
    engine, given = disk_engine(on), some(N)
    (saved,), x = on_disk(engine, some(N)), given.to("emulated")
    with held(engine, "_pwrite"):
        with held(engine, "_pread"):
            read = begin_to_read(engine, saved).event
            del saved
            engine.mover.poll()
            gc.collect()
            (again,) = saved_by(engine, x)
            engine.mover.backend.synchronize()
        read.synchronize()
    return brings(engine, again, given)


def brought_before_it_was_read(on: Program) -> bool:
    engine, given = disk_engine(on), some(N)
    (saved,) = on_disk(engine, given)
    on_disk(engine, some(N))  # whose bytes are left in the host memory
    with held(engine, "_pread") as step:
        read = begin_to_read(engine, saved)
        on.before_the_host_waits(step)
        with engine.mover.lock:
            engine.mover._send_on(read)
        result = saved.unpack().cpu()
    return result.equal(given)


def read_for_memory_in_use(on: Program) -> bool:
    engine, given, others = disk_engine(on), some(N), some(N)
    (saved,) = on_disk(engine, others)
    on.without_cached_memory()
    x = given.to("emulated")
    address = x.data_ptr()
    with on.late(compute(), engine.mover.backend.h2d):
        result = x * 2
        del x
        read_ahead(engine, saved)
        target = saved.batch.back.device[saved.index]
    assert target is not None and target.data_ptr() == address
    return result.cpu().equal(given * 2) and brings(engine, saved, others)


# Copies that the host waits for


def copies_of(**options: Any) -> PlainCopies:
    gc.collect()
    return PlainCopies(AcceleratorBackend(), OffloadConfig(**options))


def plain_computed_late(on: Program) -> bool:
    copies, given = copies_of(), some(N)
    x = given.to("emulated")
    with on.late(compute(), copies.backend.d2h):
        pending = copies.copy_to_host([x * 2], "g")
    return copies.synchronize(pending)[0].equal(given * 2)


def plain_source_let_go(on: Program) -> bool:
    return plain_source(on, copies_of())


def plain_too_much_in_flight(on: Program) -> bool:
    return plain_source(on, copies_of(max_in_flight_bytes=0))


def plain_source(on: Program, copies: PlainCopies) -> bool:
    given = some(N)
    x = given.to("emulated")
    with on.late(copies.backend.d2h, compute()):
        pending = copies.copy_to_host([x], "g")
        del x
        use_of_memory()
    return copies.synchronize(pending)[0].equal(given)


def plain_brought_into_memory_in_use(on: Program) -> bool:
    copies, given, source = copies_of(), some(N), some(N).pin_memory()
    on.without_cached_memory()
    x = given.to("emulated")
    address = x.data_ptr()
    with on.late(compute(), copies.backend.h2d):
        result = x * 2
        del x
        pending = copies.copy_to_device([source], "g")
        target = pending.tensors[0].data_ptr()
    assert target == address
    return result.cpu().equal(given * 2) and copies.synchronize(pending)[0].cpu().equal(source)


def plain_target_nobody_wants(on: Program) -> bool:
    copies, source = copies_of(), some(N).pin_memory()
    on.without_cached_memory()
    with on.late(copies.backend.h2d, compute()):
        copies.copy_to_device([source], "g")
        copies.poll()
        result = use_of_memory()
    return bool(result.eq(5).all())


def plain_copies_gone(on: Program) -> bool:
    copies, source = copies_of(), some(N).pin_memory()
    h2d = copies.backend.h2d
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
    with on.late(copies.backend.d2h) as gate:
        pending = copies.copy_to_host([x], "g")
        on.before_the_host_waits(gate)
        return copies.synchronize(pending)[0].equal(given)
