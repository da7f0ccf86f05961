"""Reloads tensors before autograd asks: earliest needed first, up to a window of bytes.

It begins when backward reaches a group. The group's own tensors come first, then those of the
groups that backward visits next, across chunks. When part of the window has been used, it is filled
again.

    window  |== this group ==|== next ==|= next chunk's last =|
            used -->                                          <-- reloaded
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import attrgetter
from typing import Any

from pp_offload._common.processes import HERE
from pp_offload._groups.group import Group
from pp_offload._groups.split_backward import SplitBackward, WeightPass
from pp_offload._policy.bound import Bound
from pp_offload._policy.bounds import SMALL_BYTES, refill_below
from pp_offload._policy.plan import ChunkKey
from pp_offload._transfer.engine import TransferEngine
from pp_offload._transfer.ticket import Ticket

LARGE_BYTES = 2**24
"""From this on, tensors of one group are reloaded as several."""


Visit = Group | WeightPass
"""What backward visits: a group, or all that the second part of a chunk's backward uses."""


class Step:
    """The step, as its chunks and the prefetcher see it. This one has a single chunk, and knows
    nothing of its backward.
    """

    num_changes: int = 0
    """Grows whenever a group was added or the order changed."""

    def add(self, chunk: Any, split: SplitBackward | None) -> ChunkKey | None:
        """A chunk's first group starts; ``split`` says whether its backward comes in two parts.

        Returns:
            Its key, in a step that may have others.
        """
        return None

    def change(self) -> None:
        """A group was offloaded, or the order changed: there is more to prefetch than before."""
        self.num_changes += 1

    def is_next(self, chunk: Any) -> bool:
        """Whether backward certainly runs ``chunk`` next."""
        return False

    def after(self, group: Group) -> Iterator[Visit]:
        """What backward visits behind ``group``, next one first."""
        return iter(())

    def begin(self, group: Group) -> None:
        """Backward has reached ``group``."""


class Prefetcher:
    """Fills the window.

    Args:
        transfer: Reloads.
        step: Says which groups come next.
        window_bytes: Bytes that may be on the device unused, as for :class:`Bound`.

    Attributes:
        window: On these bytes, as it is now.
    """

    def __init__(self, transfer: TransferEngine, step: Step, window_bytes: int | str) -> None:
        self._transfer = transfer
        self._step = step
        self.window = Bound(window_bytes, SMALL_BYTES)
        self._reloads = transfer.reloads
        self._few_bytes = 0
        self._follow_window()
        self._reloads.refill = self.fill
        self._reloads.comes_soon = self.comes_soon
        self._current: Group | None = None
        self._done_at = -1

    def on_use(self, group: Group) -> None:
        """Backward uses ``group``: bring it, and fill the window."""
        if self._transfer.owner != HERE[0]:  # before the lock: a thread lost in a fork may hold it
            self._transfer.check_process()
        with self._transfer.lock:
            if group is not self._current or not group.is_used:
                self._reach(group)
            self._fill()

    def _reach(self, group: Group) -> None:
        self._current = group
        if not group.is_used:
            group.is_used = True
            self._step.begin(group)
            for heard in self._transfer.listeners.group_reached:
                heard(group)
        if not group.is_brought:
            room = self.window.nbytes - self._reloads.nbytes
            batch = self._missing(group, room, set())
            if batch:
                self._load([batch], is_ahead=False)

    def comes_soon(self, ticket: Ticket) -> bool:
        """Whether backward will ask for ``ticket`` within the next window of bytes."""
        group, room = self._current, self.window.nbytes
        for following in () if group is None else self._step.after(group):
            for one in following.waiting():
                if one is ticket:
                    return True
                room -= one.nbytes
            if room < 0:
                return False
        return False

    def approach(self, group: Group) -> None:
        """Backward will reach ``group`` next: fill the window from there on."""
        if group is not self._current:
            self.resume(group)

    def resume(self, group: Group) -> None:
        """Backward is at ``group`` again: fill the window from there on."""
        with self._transfer.lock:
            self._begin_at(group)
            self._fill()

    def expect(self, nbytes: int) -> None:
        """A group of ``nbytes`` was offloaded, and will come back."""
        with self._transfer.lock:
            before = self.window.nbytes
            self.window.expect(nbytes)
            if self.window.nbytes != before:
                self._follow_window()
            self._reloads.refill_below_bytes = self._few_bytes  # also where all was brought

    def limit(self, most_bytes: int) -> None:
        """See :meth:`Bound.limit`."""
        with self._transfer.lock:
            self.window.limit(most_bytes)
            self._follow_window()

    def choose(self, window_bytes: int) -> None:
        """See :meth:`Bound.choose`."""
        with self._transfer.lock:
            self.window.choose(window_bytes)
            self._follow_window()

    def _follow_window(self) -> None:
        self._few_bytes = refill_below(self.window.nbytes)
        self._reloads.refill_below_bytes = self._few_bytes

    def fill(self) -> None:
        """Reload what comes next until the window is full, once some of it is free."""
        with self._transfer.lock:
            self._fill()

    def _fill(self) -> None:
        group, changes = self._current, self._step.num_changes
        if group is None or self._done_at == changes:
            return
        if self._reloads.nbytes > self._few_bytes:
            return
        room = self.window.nbytes - self._reloads.nbytes
        batches: list[list[Ticket]] = []
        chosen: set[Ticket] = set()
        for following in chain[Visit]((group,), self._step.after(group)):
            if following.is_brought:
                continue
            batch = self._missing(following, room, chosen)
            batches.append(batch)
            chosen.update(batch)
            room -= sum(map(attrgetter("nbytes"), batch))
            if not following.is_brought:
                break
        self._load(batches, is_ahead=True)
        if following.is_brought:  # the last one, so that all are
            self._done_at = changes
            self._reloads.refill_below_bytes = 0

    def reset(self) -> None:
        """Forget where backward is: the step is over."""
        with self._transfer.lock:
            self._begin_at(None)

    def _begin_at(self, group: Group | None) -> None:
        self._current = group
        self._done_at = -1
        self._follow_window()

    def _load(self, batches: list[list[Ticket]], *, is_ahead: bool) -> None:
        """Bring groups in order, small tensors together, so that one event serves many.

        Large ones have events of their own: compute would wait for all that one event is behind.
        """
        together: list[Ticket] = []
        nbytes = 0
        for batch in batches:
            for ticket in batch:
                together.append(ticket)
                nbytes += ticket.nbytes
                if nbytes >= LARGE_BYTES:
                    self._transfer.reload(together, is_ahead=is_ahead)
                    together, nbytes = [], 0
            if nbytes >= SMALL_BYTES:
                self._transfer.reload(together, is_ahead=is_ahead)
                together, nbytes = [], 0
        if together:
            self._transfer.reload(together, is_ahead=is_ahead)

    def _missing(self, visit: Visit, room: int, chosen: set[Ticket]) -> list[Ticket]:
        """Tickets of ``visit`` to bring that fit into ``room`` bytes. If all do, it is brought.

        Args:
            visit: Where to look.
            room: Bytes that may be brought. One ticket may exceed it, if nothing brought is unused.
            chosen: Tickets that will be brought before these.
        """
        batch: list[Ticket] = []
        wanted = visit.wanted()
        may_exceed = not chosen and self._reloads.nbytes == 0
        is_current = visit is self._current  # of a later one, a source may be gone by then
        for number, ticket in enumerate(wanted):
            is_here = ticket.reload is not None or (
                is_current and ticket.begin in ticket.block.sources
            )
            if not is_here and ticket not in chosen:
                if ticket.nbytes > room and not (may_exceed and not batch):
                    visit.claim(wanted[:number])
                    return batch
                batch.append(ticket)
                room -= ticket.nbytes
        visit.claim(wanted)
        visit.is_brought = True
        return batch
