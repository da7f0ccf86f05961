"""Backward in two parts: the gradients of a chunk's inputs first, those of its weights later.

Both read the same saved tensors, the second part only some of them. Which ones, and in which order,
is not known beforehand: it is recorded when a part runs, and foreseen from that for later chunks of
the same stage, and for the same chunk of the next step.

    split.begin(key, BackwardPass.INPUT)   # backward_one_chunk(full_backward=False)
    split.end()
    split.begin(key, BackwardPass.WEIGHT)  # backward_weight_one_chunk, maybe much later
    split.end()
"""

from __future__ import annotations

import enum
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from pp_offload._groups.group import Group
from pp_offload._memory.loans import Loans
from pp_offload._policy.plan import ChunkKey, GroupKey, WeightPassKey
from pp_offload._transfer.engine import TransferEngine
from pp_offload._transfer.ticket import Ticket
from pp_offload.backends import Stream


class BackwardPass(enum.Enum):
    """Which part of a backward."""

    INPUT = "input"
    WEIGHT = "weight"


class TicketIndex(NamedTuple):
    """Which ticket of a chunk, the same in every step."""

    position: int
    """The position of its group in the chunk's forward."""

    ordinal: int
    """Its own position in the group."""


Uses = Mapping[TicketIndex, int]
"""How often each ticket was used in a part, in the order of first use."""


class Known(NamedTuple):
    """A ticket's chunk, and its index there."""

    chunk: ChunkKey
    ticket_index: TicketIndex


class Kept(NamedTuple):
    """A payload that stays on the device between the parts, while its ticket lives."""

    ticket: weakref.ref[Ticket]
    tensor: Tensor
    version: int
    stream: Stream

    def is_good(self, live: Stream) -> bool:
        """Whether stream ``live`` may use it, and nobody has changed it in place."""
        return self.stream == live and self.tensor._version == self.version


class SplitBackward:
    """Stands between the tickets of such chunks and their mover, to see what is used when.

    Args:
        inner: Moves the bytes.
        chunks: Those whose backward comes in two parts.
        is_keeping: Whether what both parts use stays on the device in between.
    """

    def __init__(
        self, inner: TransferEngine, chunks: frozenset[ChunkKey], *, is_keeping: bool
    ) -> None:
        self.chunks = chunks
        self._inner = inner
        self._is_keeping = is_keeping
        self._running: tuple[ChunkKey, BackwardPass] | None = None
        self._used: Counter[TicketIndex] = Counter()
        self._seen: dict[tuple[ChunkKey | int, BackwardPass], Uses] = {}  # by chunk, and by stage
        self._kept: defaultdict[ChunkKey, dict[TicketIndex, Kept]] = defaultdict(dict)
        self._owners = Loans[Known]()
        """Tickets of what is kept. Autograd lets them go, and tells nobody."""

    def follow(self, key: GroupKey, tickets: Sequence[Ticket]) -> None:
        """A group was offloaded: know its tickets, and how often the first part will use each."""
        if key.chunk not in self.chunks:
            return
        uses = self.foreseen(key.chunk, BackwardPass.INPUT)
        for ordinal, ticket in enumerate(tickets):
            index = TicketIndex(key.position, ordinal)
            ticket.index_in_chunk = Known(key.chunk, index)
            if uses:
                ticket.num_waiting = uses.get(index, 0)  # see NOTE [ Uses ]

    def begin(self, key: ChunkKey, part: BackwardPass) -> None:
        """A part of a chunk's backward begins."""
        self._running = key, part
        self._used = Counter()

    def stop(self) -> None:
        """The part that runs ended by an exception, and teaches nothing."""
        self._running = None

    def end(self) -> None:
        """The part that runs ended well: remember what it used."""
        if self._running is not None:
            key, part = self._running
            self._seen[key, part] = self._seen[key.vp_stage, part] = self._used
            if part is BackwardPass.WEIGHT:
                self._kept.pop(key, None)
        self._forget_gone()
        self._running = None

    def clear(self) -> None:
        """The step is over: no part runs, and nothing is kept for one."""
        self._running = None
        self._kept.clear()
        self._owners = Loans()

    def foreseen(self, key: ChunkKey, part: BackwardPass) -> Uses:
        """What the part will use: what it last used in this chunk, or else in one of its stage."""
        seen = self._seen.get((key, part))
        return self._seen.get((key.vp_stage, part), {}) if seen is None else seen

    def deliver(self, ticket: Ticket) -> Tensor:
        """The payload on the device."""
        known, running = ticket.index_in_chunk, self._running
        if not isinstance(known, Known) or running is None or known.chunk != running[0]:
            return self._inner.deliver(ticket)
        (key, part), index = running, known.ticket_index
        self._used[index] += 1
        live = self._inner.backend.current_stream()
        self._forget_gone()
        kept = self._kept[key]
        found = kept.get(index) if part is BackwardPass.WEIGHT else None
        if found is not None and found.ticket() is ticket and found.is_good(live):
            return found.tensor
        tensor = self._inner.deliver(ticket)
        if (
            part is BackwardPass.INPUT
            and self._is_keeping
            and index in self.foreseen(key, BackwardPass.WEIGHT)
        ):
            self._owners.add(ticket, known)
            kept[index] = Kept(weakref.ref(ticket), tensor, tensor._version, live)
        return tensor

    def _forget_gone(self) -> None:
        for chunk, index in self._owners.ended():
            self._kept.get(chunk, {}).pop(index, None)

    def stays(self, key: ChunkKey, index: TicketIndex) -> bool:
        """Whether the first part leaves a ticket's payload on the device, for the second."""
        return self._is_keeping and index in self.foreseen(key, BackwardPass.INPUT)


class WeightPass:
    """The second part of a chunk's backward, for the queue and the prefetcher.

    Args:
        key: The chunk's.
        groups: The chunk's.
        split: Foresees what is used.
    """

    def __init__(self, key: ChunkKey, groups: Sequence[Group], split: SplitBackward) -> None:
        self.key = WeightPassKey(key)
        self.is_brought = False
        self._groups = groups
        self._split = split
        self._unclaimed: dict[TicketIndex, int] | None = None

    def is_empty_chunk(self, name: str | None = None) -> bool:
        """Whether it is known to use nothing. With a name always, for it has no groups."""
        return name is not None or not self._foreseen()

    def visits(self) -> Iterator[WeightPass]:
        """Itself, if it is known to use something."""
        if self._foreseen():
            yield self

    def waiting(self) -> list[Ticket]:
        """Tickets it is known to use."""
        return self._living(self._foreseen())

    def wanted(self) -> list[Ticket]:
        """Tickets that must be on the device, in the order of use, but for what the first part
        leaves there.
        """
        if self._unclaimed is None:
            self._unclaimed = dict(self._foreseen())
        key, stays = self.key.chunk, self._split.stays
        return self._living(index for index in self._unclaimed if not stays(key, index))

    def claim(self, tickets: Sequence[Ticket]) -> None:
        """Keep their memory until this part has used them, also what the first part is to bring.

        See NOTE [ Uses ].
        """
        for ticket in tickets:
            known = ticket.index_in_chunk
            if isinstance(known, Known) and self._unclaimed is not None:
                num_uses = self._unclaimed.pop(known.ticket_index, 0)
                ticket.num_waiting = max(ticket.num_waiting, 0) + num_uses

    def _living(self, indices: Iterable[TicketIndex]) -> list[Ticket]:
        groups = self._groups
        found = (groups[i.position].ticket(i.ordinal) for i in indices if i.position < len(groups))
        return [ticket for ticket in found if ticket is not None]

    def _foreseen(self) -> Uses:
        return self._split.foreseen(self.key.chunk, BackwardPass.WEIGHT)
