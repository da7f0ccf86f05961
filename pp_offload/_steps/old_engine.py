"""The observers of a wiring; the old engine tells them by an adapter, until the switch."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from pp_offload._core.observer import Observer, Observers
from pp_offload._core.payloads import Payloads
from pp_offload._core.stopwatch import direction, named
from pp_offload._transfer.listeners import Listener


def observers_of(wiring: Any) -> Observers:
    """Who watches the engine of a wiring."""
    if not hasattr(wiring, "observers"):
        wiring.observers = OldObservers(wiring.transfer)
    observers: Observers = wiring.observers
    return observers


class OldObservers(Observers):
    """Those of the old engine."""

    def __init__(self, transfer: Any) -> None:
        super().__init__()
        self.adapter = _Adapter(transfer, self)

    def add(self, observer: Observer) -> None:
        super().add(observer)
        self.adapter.follow()

    def remove(self, observer: Observer) -> None:
        super().remove(observer)
        self.adapter.follow()


class _Adapter(Listener):
    def __init__(self, transfer: Any, observers: Observers) -> None:
        self._transfer = transfer
        self.observers = observers
        self._laps: Any = _Laps(self)
        self._payloads: defaultdict[int, Payloads] = defaultdict(Payloads)
        self._taken: set[int] = set()
        self._batches: dict[tuple[int, int], Any] = {}

    def follow(self) -> None:
        listeners, watch = self._transfer.listeners, self._transfer.copies.stopwatch
        listeners.remove(self)
        watch.stop(self._laps)
        if any(getattr(self.observers, event.name) for event in fields(Observers)):
            listeners.add(self)
        if self.observers.copied or self.observers.waited:
            watch.add(self._laps)

    def group_opened(self, group: Any) -> None:
        for tell in self.observers.opened:
            tell(group)

    def leaving(self, tickets: Any) -> None:
        held = {ticket.payload.untyped_storage() for ticket in tickets}
        more = sum([s.nbytes() for s in held]) - sum([ticket.nbytes for ticket in tickets])
        self._payloads[threading.get_ident()].beside_bytes = max(0, more)

    def kept(self, saved: Any) -> None:
        tensors = [each.held for each in saved if isinstance(each.held, Tensor)]
        self._payloads[threading.get_ident()].tensors = tensors

    def group_closed(self, group: Any) -> None:
        payloads = self._payloads.pop(threading.get_ident(), None)
        for tell in self.observers.closed:
            tell(group, payloads)

    def group_reached(self, group: Any) -> None:
        for tell in self.observers.reached:
            tell(group)

    def taken_back(self, ticket: Any) -> None:
        self._taken.add(id(ticket))

    def delivered(self, ticket: Any, tensor: Tensor) -> None:
        saved: Any = SimpleNamespace(batch=self.batch(ticket), index=0)
        saved.batch.back.reloads[0].event = None if id(ticket) in self._taken else True
        self._taken.discard(id(ticket))
        for tell in self.observers.used:
            tell(saved, tensor)

    def batch(self, ticket: Any) -> Any:
        """By where its bytes are, as long as its ticket lives."""
        batch = self._batches.setdefault((id(ticket.block), ticket.begin), SimpleNamespace())
        batch.label, batch.sizes, batch.uses = ticket.label, [ticket.nbytes], [ticket.num_members]
        batch.back = SimpleNamespace(left=[ticket.num_waiting], reloads=[SimpleNamespace()])
        return batch


class _Laps:
    def __init__(self, adapter: _Adapter) -> None:
        self._adapter = adapter

    @property
    def is_cut(self) -> bool:
        return False

    @is_cut.setter
    def is_cut(self, is_cut: bool) -> None:
        for tell in self._adapter.observers.copied:
            tell(None, (), None, to_host=True)

    def queueing(self, label: str, *, to_host: bool) -> Any:
        return named(label, direction(to_host))

    def copied(self, lap: Any, tickets: Sequence[Any], event: Any, *, to_host: bool) -> None:
        moved = [(self._adapter.batch(ticket), [0]) for ticket in tickets]
        for tell in self._adapter.observers.copied:
            tell(lap, moved, event, to_host=to_host)

    def waited(self, lap: Any, event: Any) -> None:
        for tell in self._adapter.observers.waited:
            tell(lap, event)
