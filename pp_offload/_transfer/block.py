"""Bytes that share a place off the device: of one payload, or of several small ones.

        NOWHERE ──► ON_HOST
           │           │
           └────────►WRITING ──► ON_DISK ◄──► READING
                       │            ▲            │
                       └──► REFUSED └── READ ◄───┘

What belongs to one payload is with its ticket, as whether it is on the device again; whether a copy
has ended is for its event to say. A tier of another kind may leave its blocks ``ON_HOST``.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from pp_offload._memory.buffers import HostBuffer, Loan, Place, Spec
from pp_offload.backends import Event, Stream
from pp_offload.errors import OffloadError

AnyTicket = Any
"""A ticket: ``ticket.py`` stands on this file."""

AnyTier = Any
"""A tier: so does ``tier.py``."""

Watched = tuple[Tensor, int]
"""An alias of a saved tensor, and its version when it was saved."""

Source = tuple[Tensor, int, int, Sequence[Watched]]
"""What a copy reads, its address, its version when it was saved, and others of the same bytes to be
watched.
"""


class BlockState(enum.Enum):
    """Where the bytes are."""

    NOWHERE = "not offloaded"
    ON_HOST = "in a buffer, once the copy to the host has ended"
    WRITING = "where they were, and on their way to the disk"
    ON_DISK = "on disk alone"
    READING = "on disk, and on their way to a buffer"
    READ = "on disk, and in that buffer for a copy to the device"
    REFUSED = "where they were: the disk did not take them"

    __hash__ = object.__hash__  # that of an Enum is Python, and each move looks into a table


S = BlockState


class Harm(enum.Enum):
    """What somebody did to a source while its copy was queued."""

    CHANGED = "changed in place"
    EMPTIED = "emptied"


MOVES: dict[BlockState, frozenset[BlockState]] = {
    S.NOWHERE: frozenset({S.ON_HOST, S.WRITING}),
    S.ON_HOST: frozenset({S.WRITING}),
    S.WRITING: frozenset({S.ON_DISK, S.REFUSED}),
    S.ON_DISK: frozenset({S.READING}),
    S.READING: frozenset({S.READ, S.ON_DISK}),
    S.READ: frozenset({S.ON_DISK}),
    S.REFUSED: frozenset(),
}
"""From each state to which others. Where nobody refers to a block any more, its bytes are gone."""


class Block:
    """Bytes of one payload, or of several small ones, off the device.

    It holds the loan, so that is given back when nobody refers to the block any more. It has no
    destructor: see ``_memory/loans.py``.

    Args:
        tier: Stores the bytes, and brings them back.
        loan: Host memory for the bytes, or None.

    Attributes:
        offloaded: Behind the copy that filled the buffer; None where there is none.
        has_addresses: Whether each payload is known to have a place in host memory, in one piece;
            else each is looked at.
        tickets: Those it was made for, in the order they were saved.
        shared: By first byte, all tickets of bytes that several groups saved.
        sources: By first byte, until the bytes are stored. A pack holds thousands, so a payload
            that is asked for before then is checked alone.
        stream: The compute stream that may take these back.
        harmed: By first byte, what was done to sources before: these payloads may be anything.
    """

    __slots__ = (
        "__weakref__",
        "harmed",
        "has_addresses",
        "loan",
        "offloaded",
        "shared",
        "sources",
        "state",
        "stream",
        "tickets",
        "tier",
    )

    def __init__(self, tier: AnyTier, loan: Loan | None = None) -> None:
        self.tier = tier
        self.loan = loan
        self.state = S.NOWHERE
        self.has_addresses = True
        self.offloaded: Event | None = None
        self.stream: Stream | None = None
        self.sources: dict[int, Source] = {}
        self.harmed: dict[int, Harm] = {}
        self.tickets: list[weakref.ref[AnyTicket]] = []
        self.shared: dict[int, list[weakref.ref[AnyTicket]]] = {}

    def move_to(self, state: BlockState) -> None:
        """The bytes are somewhere else now.

        Raises:
            OffloadError: :data:`MOVES` has no such move.
        """
        if state not in MOVES[self.state]:
            raise OffloadError(
                f"bytes of tier '{self.tier.name}' that are {self.state.value} cannot be "
                f"{state.value} next; please report this"
            )
        self.state = state

    @property
    def buffer(self) -> HostBuffer | None:
        """Where the bytes are in host memory."""
        return None if self.loan is None else self.loan.buffer

    def places(self, parts: list[Spec]) -> list[Place]:
        """Where tensors lie one behind the other; meta tensors if bytes have no fixed address."""
        return [] if self.loan is None else self.loan.buffer.shaped(parts)

    def finish(self) -> None:
        """The copy has ended: drop its sources, unless the tier failed and nothing else is left."""
        self.check_sources(self.sources)
        if self.tier.has_stored(self):
            self.sources.clear()
        else:  # they are given back as they are, and so must not change later either
            for begin, (source, address, _, _) in list(self.sources.items()):
                self.sources[begin] = source, address, source._version, ()

    def check_sources(self, begins: Iterable[int]) -> None:
        """Note those of these sources that are not as they were. See NOTE [ Harm while queued ]."""
        for begin in begins:
            source, address, version, others = self.sources[begin]
            if source.data_ptr() != address:
                self.harmed[begin] = Harm.EMPTIED
            if source._version != version:
                self.harmed[begin] = Harm.CHANGED
            for alias, version in others:
                if alias._version != version:
                    self.harmed[begin] = Harm.CHANGED

    def share(self, ticket: AnyTicket) -> None:
        """Note one more ticket of bytes that another had copied."""
        first = (ref for ref in self.tickets if (one := ref()) and one.begin == ticket.begin)
        same = self.shared.setdefault(ticket.begin, list(first))
        while same and same[0]() is None:  # else it grows, where each forward saves the same table
            del same[0]
        same.append(weakref.ref(ticket))


class _Nowhere:
    """The tier of what has not left."""

    name = "nowhere"

    def load(self, tickets: Sequence[AnyTicket], *, is_ahead: bool) -> int:
        raise OffloadError("a payload was asked for before it was offloaded; please report this")

    def may_capture(self, block: Block | None = None) -> bool:
        return True


NOWHERE = Block(_Nowhere())
"""Where the bytes of a ticket are before it is offloaded."""
