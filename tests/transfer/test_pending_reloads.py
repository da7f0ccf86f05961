"""What nobody will use, while another thread looks after the same."""

from __future__ import annotations

import threading
from typing import Any

import torch

from pp_offload._transfer.pending_reloads import MAX_ABANDONED, PendingReloads
from pp_offload._transfer.ticket import PayloadTicket
from pp_offload.backends import CpuBackend


class Done:
    """An event that has passed or not, and a stream on which it is waited for."""

    def __init__(self) -> None:
        self.has_passed = False

    def query(self) -> bool:
        return self.has_passed


class Meanwhile:
    """A stream: while it waits, another thread finds that the first few copies are over."""

    def __init__(self, reloads: PendingReloads, events: list[Done], num: int) -> None:
        self.reloads, self.events, self.num = reloads, events, num
        self.waited: list[Any] = []

    def wait_event(self, event: Any) -> None:
        if not self.waited:
            for over in self.events[: self.num]:
                over.has_passed = True
            self.reloads.poll()
        self.waited.append(event)


def abandoned(num: int, num_over_meanwhile: int) -> tuple[PendingReloads, Meanwhile, list[Done]]:
    reloads, events = PendingReloads(CpuBackend().h2d), [Done() for _ in range(num)]
    stream: Any = Meanwhile(reloads, events, num_over_meanwhile)
    reloads.abandoned.extend((torch.empty(1), event, stream) for event in events)  # type: ignore[misc]
    return reloads, stream, events


def test_another_thread_lets_all_go_amid_the_wait() -> None:
    reloads, _, events = abandoned(MAX_ABANDONED + 1, MAX_ABANDONED + 1)
    reloads.keep_few_abandoned(threading.RLock())
    assert reloads.events() == [] and all(event.query() for event in events)


def test_what_nobody_waited_for_stays() -> None:
    """The one that was waited for is gone already: the next is another one."""
    reloads, stream, events = abandoned(MAX_ABANDONED + 1, 1)
    reloads.keep_few_abandoned(threading.RLock())
    assert stream.waited == events[:1]
    assert reloads.events() == events[1:]


def test_more_than_a_few_are_waited_for_the_oldest_first() -> None:
    reloads, stream, events = abandoned(MAX_ABANDONED + 3, 0)
    reloads.keep_few_abandoned(threading.RLock())
    assert stream.waited == events[:3] and reloads.events() == events[3:]


def test_what_was_expected_counts_once_when_it_comes() -> None:
    """As where a disk was read ahead of the copy to the device."""
    engine: Any = None
    member: Any = None
    ticket = PayloadTicket(engine, "g", torch.ones(100), [member], None)
    backend = CpuBackend()
    reloads, stream = PendingReloads(backend.h2d), backend.current_stream()
    reloads.expect([ticket])
    arrival = reloads.begin([ticket], [torch.ones(100)], stream)
    assert reloads.nbytes == 400 and ticket.reload is not None
    arrival.is_there = True
    assert reloads.take(ticket, ticket.reload, stream) is not None
    assert reloads.nbytes == 0 and reloads.events() == []
