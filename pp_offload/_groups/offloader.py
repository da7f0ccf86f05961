"""How a group leaves: its saved tensors become tickets, and what no other group has sent is copied.

tickets = offloader.tickets(group)  # counted, and still on the device
offloader.move(group, tickets)      # their copies are queued
"""

from __future__ import annotations

import logging
from operator import attrgetter

from pp_offload._groups.group import Group, GroupState
from pp_offload._groups.split_backward import SplitBackward
from pp_offload._transfer.deduplication import CopyIndex
from pp_offload._transfer.engine import TransferEngine
from pp_offload._transfer.payload import tickets_for
from pp_offload._transfer.ticket import Mover, Ticket, give_back, hand_over
from pp_offload._transfer.verify import Verifier

logger = logging.getLogger(__name__)


class Offloader:
    """Offloads the groups of a manager or a stash.

    Args:
        transfer: Moves tickets.
        verifier: Looks at what leaves and comes back; None without ``verify``.

    Attributes:
        copies: The host copies made in this step, which groups share.
        split: Set by a schedule whose backwards come in two parts.
    """

    def __init__(self, transfer: TransferEngine, verifier: Verifier | None = None) -> None:
        self.copies = CopyIndex()
        self.split: SplitBackward | None = None
        self._transfer = transfer
        self._verifier = verifier
        if verifier is not None:
            transfer.listeners.add(verifier)
        self._has_warned = False

    def tickets(self, group: Group) -> list[Ticket]:
        """Tickets for what may leave of ``group``, which counts them; a second time, anew."""
        mover: Mover = self.split or self._transfer
        tickets = tickets_for(group.saved(), mover, group.name)
        counts = group.counts
        counts.num_tensors = len(tickets)
        counts.nbytes = sum(map(attrgetter("nbytes"), tickets))
        return tickets

    def move(self, group: Group, tickets: list[Ticket]) -> None:
        """Queue the copies of a group's tickets, and close it.

        Raises:
            MemoryError: There is no room for all of them off the device. The group is open as
                before, and what was copied already is of no use.
        """
        transfer, copies = self._transfer, self.copies
        # A captured copy holds its bytes only after a launch of the graph, so it is not shared.
        is_capturing = transfer.backend.is_capturing
        try:
            if transfer.listeners.leaving and not is_capturing:
                with transfer.copies.reading(tickets):
                    for heard in transfer.listeners.leaving:
                        heard(tickets)
            with transfer.lock:
                new = tickets if is_capturing else copies.share(tickets)
            if new:  # this may wait, so the lock is not held
                group.counts.copied_bytes += transfer.offload(new)
            for heard in () if is_capturing else transfer.listeners.left:
                heard(tickets)
            with transfer.lock:
                if not is_capturing:
                    copies.add(new)
                hand_over(tickets)
                group.follow(tickets)
                if self.split is not None and group.key is not None:
                    self.split.follow(group.key, tickets)
                group.move_to(GroupState.OFFLOADED)
        except BaseException:
            with transfer.lock:
                transfer.copies.give_up(tickets)  # with a block it shares, one may have come
                give_back(tickets)
            raise

    def warn(self, group: Group, failure: MemoryError) -> None:
        """Log that a group finds no room off the device; the first time, as a warning."""
        logger.log(
            logging.DEBUG if self._has_warned else logging.WARNING,
            "group '%s' stays on the device, for its %d bytes find no room off it (%s); other "
            "groups may follow, without another warning",
            group.name,
            group.counts.nbytes,
            str(failure),  # NOTE [ Failures in the log ]
        )
        self._has_warned = True

    def check_freed(self) -> list[str]:
        """With ``verify=True``, see :meth:`Verifier.check_freed`; waits for all copies first."""
        if self._verifier is None:
            return []
        self._transfer.backend.synchronize()
        self._transfer.poll()
        return self._verifier.check_freed()
