"""Reloads groups ahead of backward, up to a window of bytes.

    window  |== this group ==|== next ==|= next chunk's last =|
            used -->                                          <-- reloaded

The window begins at backward's group. That group's payloads come first, then those of groups that
backward visits next, across chunks: earliest needed first. When a part of the window has been used
it is filled again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Protocol

import torch

from pp_offload._core.batch import Batch, Wanted
from pp_offload._core.group import Group
from pp_offload._core.in_flight import SMALL_BYTES, Bound, refill_below
from pp_offload._core.mover import Mover

Visit = Any  # what backward visits, which has ``batch``, ``borrowed``, ``wanted`` and ``uses``


class Order(Protocol):
    """Order in which backward visits groups. Reloads ahead depend on it, but no tensor does."""

    def after(self, group: Group) -> Iterator[Visit]:
        """Return the groups that backward visits after ``group``, the next first."""

    def begin(self, group: Group) -> None:
        """Note that backward has reached ``group``."""


class Window:
    """Reloads payloads ahead of their use."""

    def __init__(self, mover: Mover, order: Order, window_bytes: int | str) -> None:
        self.bound = Bound(window_bytes, SMALL_BYTES)  # on unused bytes
        self._mover, self._order = mover, order
        self._current: Group | None = None
        self._largest = 0
        self.below_bytes = 0  # with fewer bytes unused, the mover calls fill()
        mover.window = self

    def reach(self, group: Group) -> None:
        """Mark ``group`` as reached, reload what is missing of it, and refill the window."""
        mover = self._mover
        with mover.lock:
            if not group.is_used:
                group.note_use()
                self._order.begin(group)
                for tell in mover.observers.reached:
                    tell(group)
            self._current, self.below_bytes = group, self._few_bytes
            arrived = mover.arrived
            if mover.in_flight.queue or arrived.gone or arrived.abandoned or mover.tier.reads:
                mover.poll()
            batch = group.batch()
            if batch is not None and batch.leaving is not None:
                mover.take_back(batch)
            if batch is not None and batch.back.num_away:
                indices = self.fitting(batch, batch.back.away())
                if indices and batch.place is None:
                    mover.tier.read(batch)
                elif indices and self._reload([(batch, indices)]):
                    mover.counts.on_demand_reloads += len(indices)
            if mover.arrived.unused_bytes <= self.below_bytes:
                self.fill()

    @property
    def _few_bytes(self) -> int:
        return refill_below(self.bound.nbytes)

    def resume(self, group: Group | None) -> None:
        """Set the group that backward is at again, and refill the window; None: it is over."""
        with self._mover.lock:
            self._current = group
            self.below_bytes = 0 if group is None else self._few_bytes
            self.fill()

    def expect(self, nbytes: int) -> None:
        """Fit bounds to a group of ``nbytes`` that left, and will come back."""
        if nbytes > self._largest:
            self._largest = nbytes
            self.bound.expect(nbytes)
            self._mover.in_flight.bound.expect(nbytes)
        if self._current is not None:
            self.below_bytes = self._few_bytes  # even if all was reloaded before

    def fill(self) -> None:
        """Reload what comes next until the window is full, where enough of it is free."""
        mover = self._mover
        with mover.lock:
            group, unused = self._current, mover.arrived.unused_bytes
            if group is None or unused > self.below_bytes:
                return
            if self._bring(group, self.bound.nbytes - unused):
                self.below_bytes = 0  # until another group leaves or is reached

    def _bring(self, group: Group, room: int) -> bool:
        """Queue reloads up to ``room`` bytes; return whether all expected reloads were queued."""
        mover = self._mover
        together: list[Wanted] = []
        nbytes, is_complete = 0, True
        visits: Iterable[Visit] = chain((group,), self._order.after(group))
        for visit in visits:
            own = visit.batch()
            if not visit.borrowed and (own is None or not own.back.num_away):
                continue  # nearly always, so without a call
            for batch, indices in visit.wanted():
                if batch.mover is not mover:
                    continue  # a batch of a former epoch
                if batch.write is not None and mover.backend.is_capturing and visit is not group:
                    continue  # a reload ahead is no reason to refuse a capture
                size = sum(map(batch.sizes.__getitem__, indices))
                if batch.leaving is not None and size <= room and mover.take_back(batch):
                    room -= size
                    continue  # its sources are needed soon, and still there
                if batch.place is None and (size <= room or room == self.bound.nbytes):
                    if not self._queue(together):
                        return False
                    together, nbytes = [], 0
                    mover.tier.read(batch)
                    if batch.reading is None:  # without room in host memory
                        return False
                    room, is_complete = room - size, False
                    continue
                if size > room or nbytes >= SMALL_BYTES:
                    # With its own event: compute waits for no more than it needs.
                    if not self._queue(together):
                        return False
                    together, nbytes = [], 0
                if size > room:
                    # Reload a part, unless the batch may be taken back when backward is there.
                    if batch.place is not None and batch.leaving is None:
                        part = self.fitting(batch, indices)
                        if part and self._queue([(batch, part)]):
                            indices = indices[: -len(part)]
                    # No use has to call fill() before there is room for the next payload.
                    next_bytes = sum([batch.sizes[index] for index in indices[-1:]])
                    enough = max(0, self.bound.nbytes - next_bytes) + 1
                    self.below_bytes = min(self._few_bytes, enough)
                    return False
                if batch.place is None:
                    continue  # it was listed before, and has come with those just queued
                together.append((batch, indices))
                nbytes += size
                room -= size
        return self._queue(together) and is_complete

    def _queue(self, wanted: list[Wanted]) -> bool:
        """Queue reloads ahead; return whether that succeeded."""
        if wanted and not self._reload(wanted):
            return False
        for _, indices in wanted:
            self._mover.counts.prefetched_reloads += len(indices)
        return True

    def _reload(self, wanted: list[Wanted]) -> bool:
        """Queue reloads; if the device is full, return False, and run none ahead in this group."""
        try:
            self._mover.reload(wanted)
        except torch.OutOfMemoryError:
            self.below_bytes = 0
            return False
        return True

    def fitting(self, batch: Batch, indices: list[int]) -> list[int]:
        """Return payloads of a batch that the window has room for; always one, if nothing else on
        the device is unused. Backward asks first for what was saved last.
        """
        unused, sizes = self._mover.arrived.unused_bytes, batch.sizes
        room = self.bound.nbytes - unused
        if sum(map(sizes.__getitem__, indices)) <= room:
            return indices  # nearly always
        fitting: list[int] = []
        for index in reversed(indices):
            if sizes[index] > room and (fitting or unused):
                break
            fitting.append(index)
            room -= sizes[index]
        return fitting

    def comes_soon(self, batch: Batch, index: int) -> bool:
        """Whether backward will ask for a payload again: in this group, in the next one, or within
        the next window of bytes. It was used just now.
        """
        later, back = batch.later.get(index), batch.back
        if later is None or back.uses_left[index] > sum(later.values()):
            return True
        group, room = self._current, self.bound.nbytes
        if back.part is not None:
            back.part -= {index}
            room = self._few_bytes  # payloads for the second part must not block others
        for visit in () if group is None else self._order.after(group):
            for used_batch, indices in visit.uses():
                if used_batch is batch and index in indices:
                    return True
                room -= sum([used_batch.sizes[each] for each in indices])
            if room < 0:
                return False
        return False

    def is_at(self, batch: Batch) -> bool:
        """Whether backward is at the group that the batch is of."""
        return self._current is not None and self._current.batch() is batch
