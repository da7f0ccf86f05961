"""Chunks of a step in numbers: groups, what they saved, and who holds which memory.

    chunk = ChunkState(tape, ChunkKey(0, 3))
    chunk.groups[0].waiting()

Each name is that of the engine's own object, without tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pp_offload._memory.buffers import Loan, room_for
from pp_offload._policy.plan import ChunkKey
from pp_offload.plan.device import Bytes
from pp_offload.plan.pieces import pieces
from pp_offload.plan.tape import Payload, Tape
from pp_offload.simulate.clocks import VirtualEvent


class Held:
    """Device memory that is free when nobody holds it.

    Args:
        nbytes: What it takes.
        num_holders: Who hold it at first.
    """

    __slots__ = ("nbytes", "num_holders")

    def __init__(self, nbytes: int, num_holders: int = 1) -> None:
        self.nbytes = nbytes
        self.num_holders = num_holders

    def let_go(self, memory: Bytes) -> None:
        """One holder less."""
        self.num_holders -= 1
        if not self.num_holders:
            memory.live -= self.nbytes


class Reload(Held):
    """Device memory of payloads that came back.

    Args:
        nbytes: What it takes.
    """

    __slots__ = ("num_users",)

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.num_users = 1
        """Payloads of the same bytes whose reload it is."""


class Block:
    """Host memory, for as long as one of its payloads refers to it."""

    __slots__ = ("__weakref__", "in_flight", "loan", "offloaded", "placed", "shared")

    def __init__(self, loan: Loan) -> None:
        self.loan: Loan | None = loan
        self.offloaded: VirtualEvent | None = None
        """Behind the copy that filled it."""

        self.in_flight: dict[int, Held] = {}
        """By first byte, sources that may be taken back."""

        self.placed: list[Saved] = []
        """What it was made for."""

        self.shared: dict[int, list[Saved]] = {}
        """By first byte, all payloads of bytes that several groups saved."""

    def place(self, batch: Sequence[Saved]) -> Block:
        """Give each payload its place, one behind the other; gives back itself."""
        begin = 0
        for one in batch:
            one.block, one.begin, one.has_left = self, begin, True
            self.placed.append(one)
            begin += room_for(one.nbytes)
        return self

    def share(self, one: Saved, begin: int) -> None:
        """As the method of ``_transfer.block.Block``; ``one`` has its bytes here."""
        one.block, one.begin, one.has_left = self, begin, True
        first = [other for other in self.placed if other.begin == begin]
        self.shared.setdefault(begin, first).append(one)


class Arrival:
    """Payloads that come together; the event behind their copies is there once they are queued.

    One without memory stands for a payload that is read ahead.
    """

    __slots__ = ("is_there", "reloaded")

    def __init__(self) -> None:
        self.is_there = False
        self.reloaded: VirtualEvent | None = None


class Saved:
    """A payload of a chunk.

    Args:
        spec: What it is.
        index: Which of the chunk's.
        source: Where it is.
    """

    __slots__ = (
        "arrival",
        "begin",
        "block",
        "given",
        "has_left",
        "index",
        "is_gone",
        "memory",
        "nbytes",
        "num_waiting",
        "source",
        "spec",
    )

    def __init__(self, spec: Payload, index: int, source: Held) -> None:
        self.spec = spec
        self.index = index
        self.nbytes = spec.nbytes
        self.source = source
        self.num_waiting = spec.num_uses
        self.block: Block | None = None
        """None where it stays on the device, and where it is gone."""

        self.begin = 0
        """Its first byte there."""

        self.arrival: Arrival | None = None
        """Of its reload, until that is used up."""

        self.memory: Reload | None = None
        """Of that reload."""

        self.given: list[Held | None] = []
        """What backward was given, use by use; None where it has let go of that."""

        self.has_left = self.is_gone = False

    @property
    def reload(self) -> Arrival | None:
        """As that of a ticket; None where nothing has begun to bring it."""
        return self.arrival

    @property
    def device_tensor(self) -> Reload | None:
        """As that of a ticket."""
        return self.memory

    @property
    def source_in_flight(self) -> Held | None:
        """What may be taken back, until its copy to the host has ended."""
        return None if self.block is None else self.block.in_flight.get(self.begin)

    def others(self) -> list[Saved]:
        """Those of the same bytes: saved later, so brought and used earlier, come first."""
        same = () if self.block is None else self.block.shared.get(self.begin, ())
        return [one for one in reversed(same) if one is not self and one.block is not None]

    def stay(self) -> None:
        """It does not leave, whatever was begun for that; autograd holds its source."""
        self.block, self.has_left = None, False
        self.source.num_holders += 1

    def give(self, held: Held) -> None:
        """Backward has this memory of it until it lets go."""
        held.num_holders += 1
        self.given.append(held)

    def used(self) -> int:
        """It was asked for; how often it is expected to be asked for again."""
        left = self.num_waiting
        self.num_waiting = left = (left if left > 0 else self.spec.num_uses) - 1
        return left

    def sizes(self) -> list[int]:
        """Of the copies that move it."""
        assert self.block is not None and self.block.loan is not None
        return pieces(self.block.loan, self.begin, self.nbytes)


class GroupState:
    """A group of a chunk. It does not know which, or each would be garbage to look for."""

    __slots__ = ("is_brought", "is_used", "position", "sent")

    def __init__(self, position: int) -> None:
        self.position = position
        self.sent: list[Saved] = []
        self.is_used = self.is_brought = False

    def waiting(self) -> list[Saved]:
        """As ``Group.waiting``."""
        return [one for one in reversed(self.sent) if one.num_waiting > 0 and not one.is_gone]

    def wanted(self) -> list[Saved]:
        """As ``Group.wanted``."""
        return self.waiting()

    def claim(self, saved: Sequence[Saved]) -> None:
        """As ``Group.claim``."""


class ChunkState:
    """A microbatch of a stage.

    Args:
        tape: What it does.
        key: Which it is.
    """

    __slots__ = ("group_of", "groups", "key", "saved", "sources", "tape")

    def __init__(self, tape: Tape, key: ChunkKey) -> None:
        self.tape = tape
        self.key = key
        self.sources = sources = [Held(nbytes) for nbytes in tape.source_bytes]
        self.groups = [GroupState(position) for position in range(len(tape.groups))]
        self.saved = [Saved(one, i, sources[one.source]) for i, one in enumerate(tape.payloads)]
        self.group_of = {
            index: group
            for group, one in zip(self.groups, tape.groups, strict=True)
            for index in one.payloads
        }

    def visits(self) -> Iterator[GroupState]:
        """As ``Chunk.visits``."""
        return reversed(self.groups)


class Copied(NamedTuple):
    """Where a source was copied to."""

    version: int | None
    block: weakref.ref[Block]
    begin: int


class CopyIndex:
    """As that of ``_transfer.deduplication``: sources that are on the host already."""

    def __init__(self) -> None:
        self._copies: dict[Held, Copied] = {}

    def share(self, saved: Sequence[Saved]) -> list[Saved]:
        """Have payloads share the copy that another group has made; those without one."""
        return [one for one in saved if not self._has_shared(one)]

    def _has_shared(self, one: Saved) -> bool:
        copied = self._copies.get(one.source)
        block = None if copied is None else copied.block()
        if copied is None or block is None or copied.version != one.spec.version:
            return False
        block.share(one, copied.begin)
        return True

    def add(self, saved: Sequence[Saved]) -> None:
        """They were copied."""
        for one in saved:
            if one.spec.version is not None and one.block is not None:
                copied = Copied(one.spec.version, weakref.ref(one.block), one.begin)
                self._copies[one.source] = copied
