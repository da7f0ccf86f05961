"""The order of copies: queues copies of activations, and makes streams wait for them.

    offload  d2h waits for compute and for the last use of the host memory; copy; ``offloaded``
    reload   allocate on compute; h2d waits for compute and ``offloaded``; copy; ``reload.event``
    deliver  the live compute stream waits for ``reload.event``, once for all that came with it

NOTE [ Keep-alive ]
    The sources of a copy stay referenced until its event has passed. They are let go without a wait
    once it has, or after a wait of compute when more bytes are in flight than the bound allows.
    Their memory returns to the stream it was allocated on, which may be any stream that computed,
    so all of them wait. With ``record_stream``, the time at which memory is free again would differ
    from run to run. Reloaded memory that is never used is kept in the same way.

NOTE [ One lock ]
    Any number of backwards may run beside forwards. One lock guards the bookkeeping. It is never
    held during a wait: on a host device a wait of compute blocks the thread. A local variable holds
    the awaited object, since another thread may change the batch meanwhile. Only checksums, with
    ``verify``, wait for the device while the lock is held.

NOTE [ Side streams ]
    A tensor may be saved on a stream that is not current at the commit. So d2h waits for every
    stream on which the group saved something, and a gather on the live stream is ordered with
    them, before and after: the memory that it reads returns to the stream that allocated it.

NOTE [ Captures ]
    While a graph is captured no event may be queried, and only events of the same capture awaited:
    see ``backends/base.py``. So copies go to streams that know the capture. Device memory of
    one capture is not used outside of it. A graph owns the host memory that it copies to or from,
    for it may be launched at any time: such a place is never free again.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from pp_offload._common.processes import check
from pp_offload._core.batch import Back, Batch, Leaving, Reload, Wanted
from pp_offload._core.in_flight import IN_FLIGHT_BYTES, Arrived, Bound, ComputeStreams, InFlight
from pp_offload._core.observers import Moved, Observers, direction, lap_of, named, time_of
from pp_offload._core.payloads import Payloads
from pp_offload._core.tiers import HostTier
from pp_offload._core.verify import Verifier
from pp_offload._memory.host_pool import HostBytes
from pp_offload.backends import Backend, Event, Stream, captured, those_captured
from pp_offload.errors import OffloadError, SavedTensorModifiedError, TierError

_spec = attrgetter("shape", "dtype")  # loops in C


@dataclass
class Counts:
    """Totals since the engine was made; see ``OffloadStatistics``."""

    bytes_offloaded: int = 0
    bytes_reloaded: int = 0
    bytes_computed_again: int = 0
    prefetched_reloads: int = 0
    on_demand_reloads: int = 0
    taken_back: int = 0
    step_ms: float | None = None
    stalled_ms: float | None = None


class Mover:
    """Queues copies of activations and makes streams wait for them."""

    window: Any = None  # decides what stays for further uses, and reloads ahead
    verifier: Verifier | None = None

    def __init__(
        self, backend: Backend, tier: HostTier, max_in_flight_bytes: int | str, observers: Observers
    ) -> None:
        self.backend, self.observers = backend, observers
        self.tier: Any = tier
        self.current_stream = backend.current_stream
        self.lock = threading.RLock()  # NOTE [ One lock ]
        bound = Bound(max_in_flight_bytes, IN_FLIGHT_BYTES)
        self.in_flight = InFlight(ComputeStreams.of(backend), bound)
        self.arrived = Arrived()
        self.counts = Counts()
        self.in_graphs: set[HostBytes] = set()  # host memory of captured copies
        _MOVERS.add(self)

    # Off the device

    def offload(self, label: str, payloads: Payloads, streams: Sequence[Stream]) -> Batch:
        """Queue the copies of a group that was saved on ``streams``. Never waits; the lock is held.
        Raises Busy or a MemoryError if the tier has no room, for now or at all: nothing was queued.
        """
        arrived = self.arrived
        if self.in_flight.queue or arrived.gone or arrived.abandoned or self.tier.reads:
            self.poll()
        sources, sizes = payloads.tensors, payloads.sizes
        specs, uses = list(map(_spec, sources)), list(map(len, payloads.members))
        batch = Batch(self, label, sizes, specs, uses)
        batch.place = place = self.tier.take(batch, sizes, specs)
        live, d2h = self.current_stream(), self.backend.d2h
        sides = () if streams == [live] else [stream for stream in streams if stream != live]
        for stream in (live, *sides):
            if stream not in self.in_flight.streams:  # nearly never
                self.in_flight.streams.append(stream)  # memory returns there: NOTE [ Keep-alive ]
        if self.backend.is_capturing:
            live, d2h = captured(self.backend, live, d2h)
            sides = those_captured(self.backend, sides)
            self._keep_for_graph(place)
        verifier = None if self.backend.is_capturing else self.verifier
        if payloads.views or (sides and verifier):  # the verifier reads on the live stream, too
            self._gather(payloads, live, sides)
        if verifier is not None:
            verifier.leaves(batch, payloads)
        d2h.wait_event(live.record_event())  # the sources are computed
        for side in sides:
            d2h.wait_event(side.record_event())
        for event in place.waits_for:
            d2h.wait_event(event)  # a former owner's copy may still use this memory
        moved, copies = [(batch, range(len(sizes)))], list(place.tensors)
        batch.offloaded = place.last_use = event = self._copy(True, d2h, copies, sources, moved)
        if batch.passage is not None:
            self.tier.write(batch)
        arrived.backs.add(batch.back)  # a weak reference must live for its callback to run
        self.counts.bytes_offloaded += sum(sizes)
        if not event.query():
            batch.leaving = leaving = Leaving(batch, payloads, live)
            self.in_flight.queue.append(leaving)  # NOTE [ Keep-alive ]
            self.in_flight.nbytes += leaving.nbytes
        return batch

    def keep_bounded(self, last_bytes: int) -> None:
        """Make compute wait for the oldest copies to the host until the bound holds, or only the
        group committed last is in flight: its sources were needed until now, so a wait lowers no
        peak. A bound of 0 waits for it, too. Call without the lock: NOTE [ One lock ].
        """
        in_flight, bound = self.in_flight, self.in_flight.bound.nbytes
        most = max(bound, last_bytes) if bound else 0
        # The queue, too: an interrupt may have left it empty, with its bytes still counted.
        while in_flight.queue and in_flight.nbytes > most:
            self.poll()
            if in_flight.nbytes > most:
                self._wait_for_oldest()

    def _gather(self, payloads: Payloads, live: Stream, sides: Sequence[Stream]) -> None:
        """Make views contiguous on the live stream; see NOTE [ Side streams ]."""
        for side in sides:
            live.wait_event(side.record_event())
        payloads.gather(self.observers.gathered)
        for side in sides:
            side.wait_event(live.record_event())

    def wait_up_to(self, last: Event) -> None:
        """Make compute wait for copies to the host up to ``last``. As :meth:`keep_bounded`."""
        while any(leaving.offloaded is last for leaving in tuple(self.in_flight.queue)):
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        """Make compute wait for the oldest copy to the host, and let its sources go."""
        queue = self.in_flight.queue
        with self.lock:
            # The event alone: a reference to the Leaving would keep its sources alive.
            event = queue[0].offloaded if queue else None
        if event is None:
            return
        streams = self.in_flight.streams
        if self.backend.is_capturing:
            streams = ComputeStreams(those_captured(self.backend, streams))
        # Blocks on a host: NOTE [ One lock ].
        self._wait(streams.wait, event)
        with self.lock:
            if queue and queue[0].offloaded is event:
                self.in_flight.let_go_first()

    def after_copies(self, action: Callable[[], None]) -> None:
        """Call ``action`` when the sources of the copies queued so far were let go."""
        with self.lock:
            self.poll()
            if self.in_flight.queue:
                self.in_flight.queue[-1].then.append(action)
            else:
                action()

    def poll(self) -> None:
        """Release memory that finished copies kept alive. Never blocks."""
        with self.lock:
            if self.arrived.gone:
                self.arrived.let_go()
            if self.backend.is_capturing:
                return  # NOTE [ Captures ]
            while self.in_flight.queue and self.in_flight.queue[0].offloaded.query():
                self.in_flight.let_go_first()
            if self.arrived.abandoned:
                self.arrived.poll()
            if self.tier.disk is not None:
                self.tier.poll()

    def _captured(self, stream: Stream) -> Stream:
        """Return the stream as part of the running capture, if any: NOTE [ Captures ]."""
        return captured(self.backend, stream)[0] if self.backend.is_capturing else stream

    def _keep_for_graph(self, place: HostBytes) -> None:
        """Never free ``place`` again: NOTE [ Captures ]."""
        place.is_in_graph = True
        self.in_graphs.add(place)

    # Back to the device

    def reload(self, wanted: Sequence[Wanted]) -> None:
        """Queue copies of payloads in host memory to the device, behind one event. Never waits; the
        lock is held. Raises a torch.OutOfMemoryError if the device is full: nothing was queued.
        """
        live, device = self._captured(self.current_stream()), self.backend.device
        selected: list[Wanted] = []
        begun: list[list[Tensor]] = []
        for batch, indices in wanted:
            if batch.write is not None:
                self.tier.check_capture("reading from")
            hosts, there = batch.place.tensors, batch.back.device
            if len(indices) < len(hosts):
                indices = [index for index in indices if there[index] is None]
                hosts = [hosts[index] for index in indices]
            selected.append((batch, indices))
            begun.append(list(map(partial(torch.empty_like, device=device), hosts)))
        # All memory is allocated; a failure before this line has changed no payload.
        reload = Reload(live)
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for (batch, indices), tensors in zip(selected, begun, strict=True):
            back, hosts = batch.back, batch.place.tensors
            if len(indices) == len(hosts) == back.num_away:  # nearly always, and in C
                back.reloads[:] = [reload] * len(tensors)  # first: see Arrived.put_away()
                back.versions[:] = [-1] * len(tensors)
                back.device[:] = tensors
                back.num_away = 0
                targets += tensors
                sources += hosts
                continue
            for index, target in zip(indices, tensors, strict=True):
                if back.device[index] is None:  # else it was listed twice, by its borrower
                    back.put(index, target, reload)
                    targets.append(target)
                    sources.append(hosts[index])
        if targets:
            self._copy_back(reload, selected, targets, sources)

    def _copy_back(
        self, reload: Reload, wanted: Sequence[Wanted], targets: list[Tensor], sources: list[Tensor]
    ) -> None:
        live, h2d = reload.stream, self._captured(self.backend.h2d)
        if self.backend.is_capturing:
            for batch, _ in wanted:
                self._keep_for_graph(batch.place)
        nbytes = sum(map(attrgetter("nbytes"), targets))
        self.arrived.unused_bytes += nbytes
        self.counts.bytes_reloaded += nbytes
        h2d.wait_event(live.record_event())  # former users of the memory of the targets are done
        for batch, _ in wanted:
            h2d.wait_event(batch.offloaded)  # the host memory holds the bytes
        reload.event = event = self._copy(False, h2d, targets, sources, wanted)
        for batch, _ in wanted:
            batch.place.last_use = event
        for batch, _ in wanted:  # some are listed twice, also by a borrower
            if batch.reading is not None and not batch.back.away():
                batch.place = batch.passage = batch.reading = None  # the disk has the bytes

    def deliver(self, batch: Batch, index: int) -> Tensor:
        """Return a payload on the device, ready for the live compute stream. It is copied now if no
        copy is queued, or if it came for another stream: that one could reuse the memory while this
        one still reads it. Raises a SavedTensorModifiedError if it changed before it was copied.
        """
        live, back = self.current_stream(), batch.back
        if self.tier.reads:
            self.poll()  # else payloads read ahead are copied only when they are asked for
        tensor = None
        with self.lock:
            reload = back.reloads[index]
            is_there = reload is not None and reload.is_there and reload.stream == live
            if is_there and not batch.changed and not self.backend.is_capturing:
                tensor = back.device[index]
                if tensor is not None and back.uses_left[index] == 1 and back.versions[index] == -1:
                    self.arrived.unused_bytes -= back.sizes[index]  # as _use(), without a call
                    back.given[index], back.device[index] = weakref.ref(tensor), None
                    back.uses_left[index], back.versions[index] = 0, tensor._version
                else:
                    tensor = self._use(batch, index)
        if tensor is None:
            tensor = self._bring(batch, index, self._captured(live))
        if self.verifier is not None and not self.backend.is_capturing:
            self.verifier.came(batch, index, tensor)
        if self.arrived.unused_bytes < self.window.below_bytes:
            self.window.fill()
        return tensor

    def _use(self, batch: Batch, index: int) -> Tensor | None:
        """Count a use of a payload and return it; None if it is absent or changed."""
        back = batch.back
        tensor = back.device[index]
        if tensor is None:
            return self._again(back, index)
        before, version = back.versions[index], tensor._version
        if before not in (-1, version):  # a backward has changed it in place
            self.arrived.put_away(back, index)
            return None
        back.versions[index] = version
        uses_left = back.uses_left[index] = back.uses_left[index] - 1
        if uses_left == 0:
            back.given[index] = weakref.ref(tensor)
            back.device[index] = None
            self.arrived.unused_bytes -= back.sizes[index]
        elif not self.window.comes_soon(batch, index):
            back.given[index] = weakref.ref(tensor)
            self.arrived.put_away(back, index)
        return tensor

    @staticmethod
    def _again(back: Back, index: int) -> Tensor | None:
        """Return the tensor that autograd got before, if it still lives and is unchanged."""
        given = back.given[index]
        tensor = None if given is None else given()
        if tensor is None or tensor._version != back.versions[index]:
            return None
        tensor._fix_weakref()  # type: ignore[attr-defined]  # torch may hold it without Python
        return tensor

    def _bring(self, batch: Batch, index: int, live: Stream) -> Tensor:
        """Return the payload: its source if not yet copied, else reloaded or awaited."""
        is_asked = False
        while True:
            busy = None
            with self.lock:
                self.poll()
                if batch.leaving is not None:
                    self.take_back(batch)
                if index in batch.changed:
                    raise _changed(batch, index)
                back = batch.back
                reload = back.reloads[index]
                if reload is not None and reload.event is None and not reload.is_there:
                    self.arrived.put_away(back, index)  # queueing raised; the copy may run
                is_of_live = reload is not None and reload.stream == live
                if not is_of_live or back.device[index] is None:
                    tensor = self._again(back, index) if is_of_live else None
                    if tensor is not None:
                        return tensor
                    if batch.place is None:
                        is_ahead = batch.reading is not None
                        busy = self.tier.read(batch, force=True)
                        is_asked = not is_ahead and busy is batch.reading
                    else:
                        self._reload_now(batch, index, live)
                        reload = back.reloads[index]
            if busy is not None:
                try:
                    self._wait(methodcaller("synchronize"), busy)  # NOTE [ One lock ]
                except TierError:
                    if is_asked:
                        raise
                    # The read was queued ahead, perhaps long ago: read once more.
                continue
            assert reload is not None
            event = reload.event
            if event is not None and not reload.is_there:
                self._wait(live.wait_event, event)  # may block: NOTE [ One lock ]
                reload.is_there = True
            with self.lock:
                if back.reloads[index] is reload:
                    tensor = self._use(batch, index)
                    if tensor is not None:
                        return tensor

    def _reload_now(self, batch: Batch, index: int, live: Stream) -> None:
        """Queue the reload of a payload for the live stream; where backward is at its batch,
        together with the batch's other missing payloads that the window has room for.
        """
        self.arrived.give_up(batch.back, live)
        indices: list[int] = []
        if batch.write is not None or self.window.is_at(batch):  # a read brings all at once
            indices = self.window.fitting(batch, batch.back.away())
        if index not in indices:
            indices = [index]
        try:
            self.reload([(batch, indices)])
        except torch.OutOfMemoryError:  # the others are reloaded when asked for
            indices = [index]
            self.reload([(batch, indices)])
        self.counts.on_demand_reloads += len(indices)

    def _copy(
        self,
        to_host: bool,
        side: Stream,
        targets: list[Tensor],
        sources: list[Tensor],
        moved: Moved,
    ) -> Event:
        """Queue copies, and return the event that ``side``, perhaps captured, has behind them."""
        backend, label = self.backend, moved[0][0].label
        stream = backend.d2h if to_host else backend.h2d
        if not self.observers.copied:
            backend.copy(stream, targets, sources, label)
            return side.record_event()
        begin = time_of(backend, stream)
        with named(label, direction(to_host)):
            backend.copy(stream, targets, sources, label)
        end, event = time_of(backend, stream), side.record_event()
        lap = lap_of(begin, end, sum([target.nbytes for target in targets]))
        for tell in self.observers.copied:
            tell(lap, moved, event, to_host=to_host)
        return event

    def _wait(self, wait: Callable[[Event], None], event: Event) -> None:
        """Make compute wait for ``event``, and give observers the lap."""
        if not self.observers.waited:
            wait(event)
            return
        live = self.backend.current_stream()
        begin = time_of(self.backend, live)
        wait(event)
        lap = lap_of(begin, time_of(self.backend, live), 0)
        for tell in self.observers.waited:
            tell(lap, event)

    def take_back(self, batch: Batch) -> bool:
        """Use sources whose copy to the host has still to run, in place of reloads. The lock is
        held. Returns whether there are sources that the live stream may use.
        """
        leaving, back, live = batch.leaving, batch.back, self._captured(self.current_stream())
        if leaving is None:
            return False
        batch.changed |= leaving.changed()  # checked for any stream
        if leaving.stream != live:
            return False
        self.arrived.give_up(back, live)
        reload = Reload(live, is_there=True)
        for index, source in enumerate(leaving.sources):
            is_missing = back.device[index] is None and back.uses_left[index] > 0
            if is_missing and index not in batch.changed:
                back.put(index, source, reload)
                back.versions[index] = source._version
                self.arrived.unused_bytes += back.sizes[index]
                self.counts.taken_back += 1
        return True

    def join(self) -> None:
        """Make compute wait for all copies queued so far, as the end of a capture requires."""
        live = self.current_stream()
        for side in (self.backend.d2h, self.backend.h2d):
            side.wait_event(live.record_event())  # joins the side stream to a capture, if any
            live.wait_event(side.record_event())
        self.backend.joined()

    def __del__(self) -> None:
        """Wait for copies that may still use memory of the engine. Not for all work on their
        streams: garbage may be collected in the middle of a call of another engine on this very
        thread, which has yet to queue its part on the same stream.
        """
        with suppress(Exception):  # a copy that failed is over; at exit, the driver may be gone
            if not self.backend.is_capturing:
                self.current_stream()  # raises in a forked process, whose copies never end
                events = [leaving.offloaded for leaving in self.in_flight.queue]
                for pool in self.tier.pools:  # in both directions: the memory notes its last use
                    events += pool.copies()
                for event in events:
                    event.synchronize()

    def synchronize(self) -> None:
        """Block the host until all copies have run; impossible in a capture."""
        if not self.backend.is_capturing:
            self.backend.synchronize()
        self.poll()


def _changed(batch: Batch, index: int) -> OffloadError:
    return SavedTensorModifiedError(
        f"a tensor of group '{batch.label}' with payload shape "
        f"{tuple(batch.specs[index][0])} was modified by an inplace operation, or its "
        "storage emptied, after autograd saved it and before its bytes were copied; use an "
        "out-of-place operation there, mark the tensor with mark_not_offloadable, or have compute "
        "wait for copies with OffloadConfig(max_in_flight_bytes=0)"
    )


_MOVERS: WeakSet[Mover] = WeakSet()


def _after_fork() -> None:
    """Copies, threads and files do not follow a fork: graphs of the parent raise in the child."""
    forked: Any = partial(check, os.getppid(), "this saved tensor")
    for mover in _MOVERS:
        mover.lock = threading.RLock()  # a thread that does not exist here may hold the old one
        mover.current_stream = forked  # called first by every copy and every use


os.register_at_fork(after_in_child=_after_fork)
