"""The recorder of tapes for the old engine, until the switch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pp_offload._groups.split_backward import SplitBackward
from pp_offload._transfer.deduplication import AsSaved
from pp_offload._transfer.listeners import Listener
from pp_offload._transfer.ticket import Ticket
from pp_offload.plan.recorder import Recorder, rounded
from pp_offload.plan.tape import Close, GroupTape, Payload
from pp_offload.simulate.device import VirtualBackend


class OldRecorder(Recorder, Listener):
    """Notes what happens.

    Args:
        backend: Where it happens.
    """

    def __init__(self, backend: VirtualBackend) -> None:
        super().__init__(backend)
        self._saved: defaultdict[Any, list[AsSaved]] = defaultdict(list)
        self._closing: list[int] = []
        self._at = 0

    def group_opened(self, group: Any) -> None:
        self.opened(group)

    def left(self, tickets: Sequence[Ticket]) -> None:
        chunk = self.chunk
        self._at = len(self._raw)
        self._closing = []
        for ticket in tickets:
            if ticket.storage is None:
                self._refuse(
                    f"group '{ticket.label}' saves a view of shape {tuple(ticket.payload.shape)} "
                    "that is copied without the rest of its storage, expected whole storages"
                )
                continue
            self._closing.append(len(chunk.payloads))
            source = self._source_of(ticket.label, ticket.nbytes, ticket.storage)
            version = self._version_of((id(chunk), source), ticket)
            sizes = ticket.nbytes, rounded(ticket.nbytes)
            self._add(Payload(*sizes, source, ticket.num_members, version), [ticket])

    def _version_of(self, source: Any, ticket: Ticket) -> int | None:
        before = self._saved[source]
        for number, other in enumerate(before):
            if other.is_that_of(ticket.members):
                return number
        saved = AsSaved.of(ticket.members)
        if saved is None:
            return None
        before.append(saved)
        return len(before) - 1

    def group_closed(self, group: Any) -> None:
        position = group.key.position
        self._raw.insert(self._at, Close(position))
        self.chunk.groups[position] = GroupTape(group.name, tuple(self._closing))

    def delivered(self, ticket: Ticket, tensor: Tensor) -> None:
        self._use(ticket, tensor)


class OldEachUse(SplitBackward):
    """Has nothing brought ahead, and all brought anew for each use, so that each use has memory of
    its own, and what backward lets go of shows.
    """

    def follow(self, key: Any, tickets: Any) -> None:
        for ticket in tickets:
            ticket.num_waiting = 0

    def deliver(self, ticket: Any) -> Tensor:
        ticket.num_waiting = 1
        return self._inner.deliver(ticket)  # type: ignore[attr-defined, no-any-return]


def recorder_of(backend: VirtualBackend) -> Recorder:
    """That of the engine in use."""
    return Recorder(backend) if _is_core() else OldRecorder(backend)


def watched(wiring: Any) -> Any:
    """Who the engine tells what it does."""
    return wiring.observers if _is_core() else wiring.transfer.listeners


def _is_core() -> bool:
    return "_core" in SplitBackward.__module__
