"""Faults of a device: streams that forget a wait, events that lie, copies that do not happen.

They know the backend's interface alone, so they stay good whatever the engine looks like inside.

    install(SEAM["h2d ignores d2h"])    # from now on, simulated backends have the fault
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ORDER = ("tests/core/test_order.py",)
BYTES = ("tests/core/test_payloads.py",)


@dataclass(frozen=True)
class SeamFault:
    """A fault of a backend."""

    plant: Callable[[Any], None]
    """Changes a simulated backend that was just made."""

    why: str
    """What goes wrong."""

    tests: tuple[str, ...] = ORDER
    """Files of which a test has to fail."""


def forget(stream: Any, is_forgotten: Callable[[Any], bool]) -> None:
    """``stream`` does not wait for events of some streams."""
    wait_event = stream.wait_event
    stream.wait_event = lambda event: None if is_forgotten(event.stream) else wait_event(event)


def each_compute_stream(backend: Any, change: Callable[[Any], None], *, first: bool = True) -> None:
    """Change the main compute stream, unless ``first`` is False, and those that are made later."""
    if first:
        change(backend.current_stream())
    new_stream = backend.new_stream

    def make(name: str) -> Any:
        stream = new_stream(name)
        change(stream)
        return stream

    backend.new_stream = make


def is_compute(stream: Any) -> bool:
    return not stream.is_copy


def d2h_ignores_compute(backend: Any) -> None:
    forget(backend.d2h, is_compute)


def h2d_ignores_compute(backend: Any) -> None:
    forget(backend.h2d, is_compute)


def h2d_ignores_d2h(backend: Any) -> None:
    forget(backend.h2d, lambda stream: stream is backend.d2h)


def d2h_ignores_h2d(backend: Any) -> None:
    forget(backend.d2h, lambda stream: stream is backend.h2d)


def compute_ignores_h2d(backend: Any) -> None:
    each_compute_stream(backend, lambda s: forget(s, lambda stream: stream is backend.h2d))


def compute_ignores_d2h(backend: Any) -> None:
    each_compute_stream(backend, lambda s: forget(s, lambda stream: stream is backend.d2h))


def side_streams_ignore_h2d(backend: Any) -> None:
    ignore = lambda s: forget(s, lambda stream: stream is backend.h2d)  # noqa: E731
    each_compute_stream(backend, ignore, first=False)


def change_events(stream: Any, change: Callable[[Any], None]) -> None:
    """Change every event that ``stream`` records."""
    record_event = stream.record_event

    def record() -> Any:
        event = record_event()
        change(event)
        return event

    stream.record_event = record


def says_yes(event: Any) -> None:
    event.query = lambda: True


def d2h_events_say_yes(backend: Any) -> None:
    change_events(backend.d2h, says_yes)


def h2d_events_say_yes(backend: Any) -> None:
    change_events(backend.h2d, says_yes)


def does_not_wait(event: Any) -> None:
    event.synchronize = lambda: says_yes(event)


def host_waits_for_no_d2h(backend: Any) -> None:
    change_events(backend.d2h, does_not_wait)


def events_are_the_ones_before(stream: Any) -> None:
    """Each event is where the one before should be."""
    last = [stream.record_event()]
    record_event = stream.record_event

    def record() -> Any:
        last.append(record_event())
        return last.pop(0)

    stream.record_event = record


def d2h_events_are_late_by_one(backend: Any) -> None:
    events_are_the_ones_before(backend.d2h)


def h2d_events_are_late_by_one(backend: Any) -> None:
    events_are_the_ones_before(backend.h2d)


def compute_event_is_made_once(backend: Any) -> None:
    """As if an event was cached and not recorded again."""

    def once(stream: Any) -> None:
        event = stream.record_event()
        stream.record_event = lambda: event

    each_compute_stream(backend, once)


Copy = Callable[[Any, list[Any], list[Any], str], None]


def change_copies(backend: Any, stream: Any, change: Callable[[Copy], Copy]) -> None:
    """Replace the copies of one stream."""
    copy: Copy = backend.copy
    changed = change(copy)

    def queue(at: Any, targets: list[Any], sources: list[Any], label: str) -> None:
        (changed if at is stream else copy)(at, targets, sources, label)

    backend.copy = queue


def skipped(copy: Copy) -> Copy:
    return lambda at, targets, sources, label: None


def all_but_the_last(copy: Copy) -> Copy:
    return lambda at, targets, sources, label: copy(at, targets[:-1], sources[:-1], label)


def halves(copy: Copy) -> Copy:
    """The first half of what is copied at a time."""

    def first(tensor: Any) -> Any:
        return tensor[: (len(tensor) + 1) // 2] if tensor.dim() and len(tensor) > 1 else tensor

    return lambda at, targets, sources, label: copy(
        at, [first(t) for t in targets], [first(s) for s in sources], label
    )


def reversed_targets(copy: Copy) -> Copy:
    """Where two of one shape are copied at a time, each goes where the other should."""

    def queue(at: Any, targets: list[Any], sources: list[Any], label: str) -> None:
        shapes = [(t.shape, t.dtype) for t in targets]
        copy(at, targets[::-1] if shapes == shapes[::-1] else targets, sources, label)

    return queue


def copies_to_host_are_skipped(backend: Any) -> None:
    change_copies(backend, backend.d2h, skipped)


def copies_to_device_are_skipped(backend: Any) -> None:
    change_copies(backend, backend.h2d, skipped)


def last_copy_to_host_is_forgotten(backend: Any) -> None:
    change_copies(backend, backend.d2h, all_but_the_last)


def last_copy_to_device_is_forgotten(backend: Any) -> None:
    change_copies(backend, backend.h2d, all_but_the_last)


def half_is_copied_to_the_host(backend: Any) -> None:
    change_copies(backend, backend.d2h, halves)


def copies_to_host_are_swapped(backend: Any) -> None:
    change_copies(backend, backend.d2h, reversed_targets)


def records_before_the_copy(backend: Any, stream: Any) -> None:
    """The event behind a copy is where the stream was before it."""
    record_event = stream.record_event
    early: list[Any] = []

    def change(copy: Copy) -> Copy:
        def queue(at: Any, targets: list[Any], sources: list[Any], label: str) -> None:
            early[:] = [record_event()]
            copy(at, targets, sources, label)

        return queue

    change_copies(backend, stream, change)
    stream.record_event = lambda: early.pop() if early else record_event()


def d2h_records_before_the_copy(backend: Any) -> None:
    records_before_the_copy(backend, backend.d2h)


def h2d_records_before_the_copy(backend: Any) -> None:
    records_before_the_copy(backend, backend.h2d)


def waits_behind_the_copy(backend: Any, stream: Any) -> None:
    """What a copy should wait for, the next one waits for."""
    wait_event = stream.wait_event
    waiting: list[Any] = []

    def change(copy: Copy) -> Copy:
        def queue(at: Any, targets: list[Any], sources: list[Any], label: str) -> None:
            copy(at, targets, sources, label)
            while waiting:
                wait_event(waiting.pop(0))

        return queue

    change_copies(backend, stream, change)
    stream.wait_event = waiting.append


def d2h_waits_behind_the_copy(backend: Any) -> None:
    waits_behind_the_copy(backend, backend.d2h)


def h2d_waits_behind_the_copy(backend: Any) -> None:
    waits_behind_the_copy(backend, backend.h2d)


def host_memory_is_given_twice(backend: Any) -> None:
    """Who asks for as many bytes as somebody before gets the same."""
    given: dict[int, Any] = {}
    allocate = backend.allocate_host

    def allocate_host(nbytes: int) -> Any:
        if nbytes not in given:
            given[nbytes] = allocate(nbytes)
        return given[nbytes]

    backend.allocate_host = allocate_host


def live_stream_is_cached(backend: Any) -> None:
    """The engine sees the stream that was current at first; operators run on the live one."""
    live, first, activate = backend.current_stream, backend.current_stream(), backend.activate

    def activated() -> Any:
        backend.current_stream = live
        try:
            return activate()
        finally:
            backend.current_stream = lambda: first

    backend.activate = activated
    backend.current_stream = lambda: first


SEAM: dict[str, SeamFault] = {
    "d2h ignores compute": SeamFault(
        d2h_ignores_compute, "a tensor is copied to the host before it was computed"
    ),
    "h2d ignores compute": SeamFault(
        h2d_ignores_compute, "a reload writes device memory that compute still uses"
    ),
    "h2d ignores d2h": SeamFault(h2d_ignores_d2h, "a host buffer is read before it was written"),
    "d2h ignores h2d": SeamFault(
        d2h_ignores_h2d, "a host buffer is written while a reload still reads it"
    ),
    "compute ignores h2d": SeamFault(compute_ignores_h2d, "a tensor is used before it is back"),
    "compute ignores d2h": SeamFault(
        compute_ignores_d2h, "a source above the cap is let go before its copy has run"
    ),
    "side streams ignore h2d": SeamFault(
        side_streams_ignore_h2d, "a stream that is not the first uses a tensor before it is back"
    ),
    "d2h events say yes": SeamFault(
        d2h_events_say_yes, "a source is let go before its copy has run"
    ),
    "h2d events say yes": SeamFault(
        h2d_events_say_yes, "host memory is given back while a reload still reads it"
    ),
    "host waits for no d2h": SeamFault(
        host_waits_for_no_d2h, "host memory is given back while a copy still writes it"
    ),
    "d2h events are late by one": SeamFault(
        d2h_events_are_late_by_one, "the event of another group is waited for"
    ),
    "h2d events are late by one": SeamFault(
        h2d_events_are_late_by_one, "the event of another reload is waited for"
    ),
    "compute event is made once": SeamFault(
        compute_event_is_made_once, "copies wait for what compute had done at the start"
    ),
    "d2h records before the copy": SeamFault(
        d2h_records_before_the_copy, "who waits for the event does not wait for the copy"
    ),
    "h2d records before the copy": SeamFault(
        h2d_records_before_the_copy, "who waits for the event does not wait for the reload"
    ),
    "d2h waits behind the copy": SeamFault(
        d2h_waits_behind_the_copy, "the wait comes too late by one copy"
    ),
    "h2d waits behind the copy": SeamFault(
        h2d_waits_behind_the_copy, "the wait comes too late by one reload"
    ),
    "live stream is cached": SeamFault(
        live_stream_is_cached, "waits are of a stream that does not compute"
    ),
    "host memory is given twice": SeamFault(
        host_memory_is_given_twice, "the bytes of one owner are overwritten by another"
    ),
    "copies to host are skipped": SeamFault(
        copies_to_host_are_skipped, "garbage comes back", BYTES
    ),
    "copies to device are skipped": SeamFault(
        copies_to_device_are_skipped, "garbage comes back", BYTES
    ),
    "last copy to host is forgotten": SeamFault(
        last_copy_to_host_is_forgotten, "one tensor of a group is garbage", BYTES
    ),
    "last copy to device is forgotten": SeamFault(
        last_copy_to_device_is_forgotten, "one tensor of a reload is garbage", BYTES
    ),
    "half is copied to the host": SeamFault(
        half_is_copied_to_the_host, "the rest of a tensor is garbage", BYTES
    ),
    "copies to host are swapped": SeamFault(
        copies_to_host_are_swapped, "tensors of one shape change places", BYTES
    ),
}


def install(fault: SeamFault) -> None:
    """Give the fault to every simulated backend that is made from now on."""
    import pp_offload.testing as public

    class Faulty(public.SimulatedBackend):
        """A simulated device with a fault."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            fault.plant(self)

    public.SimulatedBackend = Faulty  # type: ignore[misc]
