"""What is reloaded before it is asked for: earliest needed first, up to a window of bytes.

Backward reaching a group is the signal. The group's own tensors come first, then those of the
groups backward visits next, across chunks. When half of the window has been used, it is filled
again.

    window  |== this group ==|== next ==|= next chunk's last =|
            used -->                                          <-- reloaded
"""

from __future__ import annotations

from collections.abc import Iterator

from pp_offload.group import OffloadTensorGroup
from pp_offload.transfer import Ticket, TransferEngine


class Upcoming:
    """Which groups backward visits next."""

    num_changes: int = 0
    """Grows whenever a group was added or the order changed."""

    def after(self, group: OffloadTensorGroup) -> Iterator[OffloadTensorGroup]:
        """The groups behind ``group``, next one first. It has none."""
        return iter(())

    def begin(self, group: OffloadTensorGroup) -> None:
        """Backward has reached ``group``."""


class Prefetcher:
    """Fills the window.

    Args:
        transfer: Reloads.
        upcoming: Says which groups come next.
        window_bytes: Bytes that may be on the device unused; None for twice the largest group.
    """

    def __init__(
        self, transfer: TransferEngine, upcoming: Upcoming, window_bytes: int | None
    ) -> None:
        self._transfer = transfer
        self._upcoming = upcoming
        self._window_bytes = window_bytes or 0
        transfer.refill_below_bytes = self._window_bytes // 2
        self._follows_groups = window_bytes is None
        self._current: OffloadTensorGroup | None = None
        self._done_at = -1

    def on_use(self, group: OffloadTensorGroup) -> None:
        """Backward uses ``group``: bring it, and fill the window."""
        if group is not self._current:
            self._current = group
            if not group.is_used:
                group.is_used = True
                self._upcoming.begin(group)
            self._bring(group)
            self.fill()
        elif 2 * self._transfer.landed_bytes < self._window_bytes:
            self.fill()

    def expect(self, nbytes: int) -> None:
        """A group of ``nbytes`` was offloaded, and will come back."""
        if self._follows_groups and 2 * nbytes > self._window_bytes:
            self._window_bytes = 2 * nbytes
            self._transfer.refill_below_bytes = nbytes

    def fill(self) -> None:
        """Reload what comes next until the window is full."""
        group, changes = self._current, self._upcoming.num_changes
        if group is None or self._done_at == changes:
            return
        if self._load(group) and all(map(self._load, self._upcoming.after(group))):
            self._done_at = changes

    def reset(self) -> None:
        """The step is over."""
        self._current = None
        self._done_at = -1

    def _bring(self, group: OffloadTensorGroup) -> None:
        batch, _ = self._missing(group)
        if batch:
            self._transfer.counters.on_demand_reloads += len(batch)
            self._transfer.reload(batch)

    def _load(self, group: OffloadTensorGroup) -> bool:
        """Prefetch ``group`` as far as the window allows; whether all of it is there now."""
        if group.is_brought:
            return True
        batch, group.is_brought = self._missing(group)
        if batch:
            self._transfer.prefetch(batch)
        return group.is_brought

    def _missing(self, group: OffloadTensorGroup) -> tuple[list[Ticket], bool]:
        room = self._window_bytes - self._transfer.landed_bytes
        is_empty = self._transfer.landed_bytes == 0
        batch: list[Ticket] = []
        for ticket in group.tickets_last_first():
            if ticket.landed is not None or ticket.num_waiting <= 0:
                continue
            if ticket.nbytes > room and not (is_empty and not batch):
                return batch, False
            batch.append(ticket)
            room -= ticket.nbytes
        return batch, True
