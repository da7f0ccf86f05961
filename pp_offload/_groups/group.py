"""A named set of saved tensors that leave and come back together.

A group is open from its start to its commit; what autograd saves meanwhile joins it. The commit
either offloads it or keeps it. Autograd owns the tensors: an open group refers to them weakly, and
a closed one, as weakly, to the tickets it may prefetch.

       OPEN --commit--> OFFLOADED   copies queued
         +------commit--> KEPT      stays on the device: policy, or no room on the host
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Sequence

from pp_offload._policy.plan import GroupKey
from pp_offload._transfer.ticket import SavedActivation, Ticket
from pp_offload.errors import GroupStateError


class GroupState(enum.Enum):
    """Where a group is in its life."""

    OPEN = "open"
    OFFLOADED = "offloaded"
    KEPT = "kept on the device"


class Counts:
    """What a group has to move, and what it moved."""

    num_tensors: int = 0
    """Payloads that may leave, whether or not the plan lets them."""

    nbytes: int = 0
    """Bytes of those payloads."""

    copied_bytes: int = 0
    """Bytes that it copied itself: fewer, if another group had copied some of them."""


class Group:
    """Tensors saved between a start and its commit.

    Args:
        name: The user's name for it, such as ``mlp_norm``.
        key: Its place in the step, if it has one.
        bring: Called with the group whenever backward is about to use one of its tensors.

    Attributes:
        has_failed: Whether an exception came out of its forward, as far as a context around that
            has seen one.
        saved_refs: What autograd saved, as long as it is open; autograd may drop it before.
    """

    def __init__(
        self,
        name: str,
        *,
        key: GroupKey | None = None,
        bring: Callable[[Group], None] | None = None,
    ) -> None:
        self.name = name
        self.key = key
        self.state = GroupState.OPEN
        self.is_used = False
        self.is_brought = False
        self.has_failed = False
        self.counts = Counts()
        self.bring = bring
        self.saved_refs: list[weakref.ref[SavedActivation]] = []
        self._tickets: list[weakref.ref[Ticket]] = []

    def saved(self) -> list[SavedActivation]:
        """What autograd saved and still holds, in order, as long as the group is open."""
        return [saved for ref in self.saved_refs if (saved := ref()) is not None]

    @property
    def is_alive(self) -> bool:
        """Whether autograd holds a tensor that it saved here and that left or may leave."""
        return any([ref() for ref in self._tickets]) or bool(self.saved())

    def move_to(self, state: GroupState) -> None:
        """Close the group: it is offloaded, or kept.

        Raises:
            GroupStateError: It was closed before.
        """
        if self.state is not GroupState.OPEN or state is GroupState.OPEN:
            raise GroupStateError(
                f"group '{self.name}' is {self.state.value} and cannot become {state.value}; only "
                "an open group changes, once: commit it once"
            )
        self.state = state
        self.saved_refs = []

    @property
    def is_forgotten(self) -> bool:
        """Whether its forward ended well, backward used it, and nobody has committed it."""
        return self.state is GroupState.OPEN and self.is_used and not self.has_failed

    @property
    def is_left_behind(self) -> bool:
        """Whether nobody has committed it, and no backward has used what it saved."""
        return self.state is GroupState.OPEN and not self.is_used and bool(self.saved_refs)

    def follow(self, tickets: list[Ticket]) -> None:
        """Refer to these tickets, weakly, for prefetch."""
        self._tickets = list(map(weakref.ref, tickets))

    def ticket(self, index: int) -> Ticket | None:
        """One of those it follows, if it lives."""
        return self._tickets[index]() if index < len(self._tickets) else None

    def waiting(self) -> list[Ticket]:
        """Tickets that backward has still to ask for, in the order of use: last saved first."""
        return [
            ticket
            for ref in reversed(self._tickets)
            if (ticket := ref()) is not None and ticket.num_waiting > 0
        ]

    wanted = waiting
    """Tickets that must be on the device when backward reaches it, in the order of use."""

    def claim(self, tickets: Sequence[Ticket]) -> None:
        """Nothing to do: its tickets count their uses from the commit on."""

    def on_use(self) -> None:
        """Backward is about to use one of the tensors."""
        if self.bring is not None:
            self.bring(self)

    def drop(self) -> None:
        """Forget every tensor of an open group, as when the step was aborted."""
        self.saved_refs.clear()
