"""What a tier is: a place for offloaded bytes, in one file and under one name.

    class InOwnMemory(Tier):
        name, is_gathering = "own", True

        def allocate(self, batch, nbytes):
            return [place(batch, Block(self, self._loan(nbytes)))]  # or raises MemoryError

        def store(self, tickets, blocks):
            return self._copies.copy_to_host(tickets, blocks)

        def load(self, tickets, *, is_ahead):
            return self._copies.copy_to_device(tickets)

        def statistics(self): ...

    add_tier("own", lambda setup: InOwnMemory(setup.copies))   # of ``tiers.py``
    OffloadConfig(tiers=("host", "own"))

NOTE [ What a tier keeps to ]
    Lock: the engine's lock is held in every call but ``retire``, ``close``, ``may_capture`` and
    ``is_bringing``. So a tier never waits, neither for a copy nor for a thread. If something has to
    end first, ``allocate``, a ``load`` on demand, ``compact`` and ``release_idle`` raise
    ``Unfinished``, before they begin anything that a second call would begin again; the engine
    waits and calls again.

    No room: ``allocate`` raises MemoryError, which says what helps. Then the next tier is asked; if
    the last one refuses too, the group stays on the device with a warning.

    Lost: a payload that cannot be brought back raises :class:`~pp_offload.errors.TierError`, from
    ``load`` on demand or from the event that compute waits for. The user gets it each time that the
    tensor is asked for. A payload that cannot be stored raises nothing: ``has_stored`` says so, and
    then its source, which was kept, is given back as it is.

    Order: what a copy reads or writes is registered before the copy is queued, or an interrupt
    between the two would free it: ``Copies.in_flight.begin`` for sources,
    ``Copies.reloads.begin`` for targets; ``copy_to_host`` and ``copy_to_device`` do both. A buffer
    knows its last uses, which its next user waits for.

    Valid: a host buffer has its bytes when ``block.offloaded`` has ended, which ``poll`` may find;
    device memory has them when the event of its ``Arrival`` has, for which compute waits.

    Free: no call says that bytes are not needed any more. Whoever needs them refers to the
    ``Block``; when that goes, its loan and its extent go with it, on any thread (see
    ``_memory/loans.py``). Copies that are queued may still use that memory: it is the tier's until
    the last uses of the buffer have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pp_offload._memory.budget import HostBudget
from pp_offload._memory.disk import DiskStatistics
from pp_offload._memory.host import HostStatistics
from pp_offload._memory.slabs import Allocate
from pp_offload._transfer.block import Block
from pp_offload._transfer.copies import Copies
from pp_offload._transfer.ticket import Ticket
from pp_offload.config import OffloadConfig

NO_HOST_MEMORY = HostStatistics(0, 0, 0, 0, 0, 0)
"""What a tier holds that has none."""


@dataclass(frozen=True, kw_only=True)
class TierStatistics:
    """What a tier holds and did."""

    num_payloads: int
    """Payloads that are there."""

    host: HostStatistics = NO_HOST_MEMORY
    """Host memory for bytes at rest or on the way."""

    disk: DiskStatistics = DiskStatistics()
    """Room on disk."""


class Tier(Protocol):
    """A place for offloaded bytes. See NOTE [ What a tier keeps to ].

    Methods with a body here are for tiers that need more; others leave them out.
    """

    name: str
    """Its name in the options and in messages."""

    is_gathering: bool
    """Whether all of a group is stored at once, behind one event. Else each batch is stored as soon
    as it has room, so that a group may be larger than what may be on its way.
    """

    def allocate(self, batch: list[Ticket], nbytes: int) -> list[Block]:
        """Room for tickets that may share it.

        Args:
            batch: Tickets without a block.
            nbytes: What they take together, one behind the other.

        Returns:
            Blocks in which each ticket has its place: see ``place`` of ``ticket.py``.

        Raises:
            MemoryError: There is none. Nothing was begun, and the tickets may go elsewhere.
            Unfinished: What is on its way has to make room first.
        """
        ...

    def store(self, tickets: Sequence[Ticket], blocks: Sequence[Block]) -> int:
        """Queue copies of tickets to their places; returns the number of bytes.

        Args:
            tickets: In order; of one batch, or of all of a group that have room here.
            blocks: What :meth:`allocate` has given for them.
        """
        ...

    def load(self, tickets: Sequence[Ticket], *, is_ahead: bool) -> int:
        """Begin to bring payloads back to the device.

        Args:
            tickets: Stored here, at least one. Some may have come meanwhile.
            is_ahead: Whether a payload may be left until it is asked for, as where there is no
                buffer. If not, there is one ticket, and its device memory is known on return.

        Returns:
            How many are on their way; those that share bytes count once.

        Raises:
            TierError: They are lost. Not with ``is_ahead``.
            Unfinished: Something has to end first. Not with ``is_ahead``.
        """
        ...

    def statistics(self) -> TierStatistics:
        """Numbers that are exact at the call."""
        ...

    def host_bytes_in_use(self) -> int:
        """Of :meth:`statistics`, this alone; a trace asks often."""
        return self.statistics().host.in_use

    def has_stored(self, block: Block) -> bool:
        """Whether the bytes were stored. Called when the copy or the write has ended."""
        return True

    def may_capture(self, block: Block | None = None) -> bool:
        """Whether copies to here, or back from ``block``, may be part of a captured graph.

        True where bytes move on streams alone. Only a tier that says False is asked the next two.
        """
        return True

    @property
    def is_bringing(self) -> bool:
        """Whether something that was begun ahead goes on to the device only in :meth:`poll`."""
        return False

    def poll(self) -> None:
        """Go on with what has ended meanwhile. Never blocks."""
        return

    def compact(self) -> None:
        """Between steps: make memory as tight as what the steps needed, and try again what failed.

        Raises:
            Unfinished: Copies still use it.
        """
        return

    def release_idle(self) -> None:
        """Give memory back to the system that no saved tensor needs.

        Raises:
            Unfinished: Copies still use it.
        """
        return

    def retire(self) -> None:
        """No more bytes will come: keep only what living saved tensors need."""
        return

    def close(self) -> None:
        """Copies are done: drop all that no saved tensor needs."""
        return


@dataclass(frozen=True, kw_only=True)
class TierSetup:
    """What a tier is made of."""

    copies: Copies
    """Moves bytes between the device and host memory."""

    config: OffloadConfig

    allocate: Allocate
    """Gives host memory that copies can use."""

    budget: HostBudget
    """For all host memory that the tiers take together."""

    budget_at_rest: HostBudget
    """The part of it for bytes that stay in host memory."""
