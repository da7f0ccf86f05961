"""Chunks of a step in numbers: groups, what they saved, and who holds which memory.

    chunk = ChunkState(tape, ChunkKey(0, 3))
    chunk.groups[0].waiting()

Each name is that of the engine's own object, without tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pp_offload._groups.plan import ChunkKey
from pp_offload._memory.buffers import Loan
from pp_offload.plan.host import pieces
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


class Block:
    """Host memory, for as long as one of its payloads refers to it."""

    __slots__ = ("loan", "offloaded_s")

    def __init__(self, loan: Loan) -> None:
        self.loan = loan
        self.offloaded_s = 0.0


class Arrival:
    """Payloads that come together; the event behind their copies is there once they are queued."""

    __slots__ = ("is_there", "reloaded")

    def __init__(self) -> None:
        self.is_there = False
        self.reloaded: VirtualEvent | None = None


class Saved:
    """A payload of a chunk."""

    __slots__ = (
        "arrival",
        "begin",
        "block",
        "given",
        "has_left",
        "is_gone",
        "is_in_flight",
        "memory",
        "nbytes",
        "num_waiting",
        "source",
        "spec",
    )

    def __init__(self, spec: Payload, source: Held) -> None:
        self.spec = spec
        self.nbytes = spec.nbytes
        self.source = source
        self.num_waiting = spec.num_uses
        self.block: Block | None = None
        """None where it stays on the device, and where it is gone."""

        self.begin = 0
        """Its first byte there."""

        self.is_in_flight = False
        """Whether the source may be taken back."""

        self.arrival: Arrival | None = None
        """Of its reload, until that is used up."""

        self.memory: Held | None = None
        """Of that reload."""

        self.given: list[Held] = []
        """What backward was given, and has not let go of."""

        self.has_left = self.is_gone = False

    def sizes(self) -> list[int]:
        """Of the copies that move it."""
        assert self.block is not None
        return pieces(self.block.loan, self.begin, self.nbytes)


class GroupState:
    """A group of a chunk."""

    __slots__ = ("chunk", "is_brought", "is_used", "name", "position", "sent")

    def __init__(self, chunk: ChunkState, name: str, position: int) -> None:
        self.chunk = chunk
        self.name = name
        self.position = position
        self.sent: list[Saved] = []
        self.is_used = self.is_brought = False

    def waiting(self) -> list[Saved]:
        """As ``Group.waiting``."""
        return [one for one in reversed(self.sent) if one.num_waiting > 0 and not one.is_gone]


class ChunkState:
    """A microbatch of a stage.

    Args:
        tape: What it does.
        key: Which it is.
    """

    def __init__(self, tape: Tape, key: ChunkKey) -> None:
        self.tape = tape
        self.key = key
        self.sources = [Held(nbytes) for nbytes in tape.source_bytes]
        self.groups = [GroupState(self, one.name, i) for i, one in enumerate(tape.groups)]
        self.saved = [Saved(one, self.sources[one.source]) for one in tape.payloads]
        self.group_of = {
            index: group
            for group, one in zip(self.groups, tape.groups, strict=True)
            for index in one.payloads
        }


@dataclass
class BackwardQueue:
    """Chunks in the order in which backward runs them, as a schedule has told it."""

    order: Sequence[ChunkKey]
    queued: dict[ChunkKey, ChunkState] = field(default_factory=dict)
    begun: set[ChunkKey] = field(default_factory=set)
    num_done: int = 0

    def certain(self) -> Iterator[ChunkState]:
        """As ``ChunkQueue.certain``."""
        for key in self.order[self.num_done :]:
            if key in self.queued:
                yield self.queued[key]
            elif key not in self.begun:
                return

    def begin(self, key: ChunkKey) -> None:
        """Its backward begins."""
        self.queued.pop(key, None)
        self.begun.add(key)
        while self.num_done < len(self.order) and self.order[self.num_done] in self.begun:
            self.num_done += 1
