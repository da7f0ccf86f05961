"""Tape: work and memory of a chunk on the device, in the order in which the host launches it.

A tape is recorded once and played for every microbatch. It contains no decisions of the engine:
whether a group leaves, when its sources are freed and when its payloads are reloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pp_offload._common.offload_plan import PlannedGroup
from pp_offload._core.group import Place


class Payload(NamedTuple):
    """Bytes that a group saves, and may send away."""

    nbytes: int  # that are copied, or computed again
    source: int  # number of the tape's source that has the bytes
    num_uses: int  # expected in backward
    # Version of the source when it was saved: groups that saved the same version share a copy.
    version: int | None = None  # None if the source is not shared
    # Operators, and uses of other payloads, that compute the payload again if its group leaves.
    again: tuple[Event, ...] | None = None  # None if the payload is copied
    # Time in which compute copies a part out of its source, if it is copied without the rest.
    gather_s: float | None = None
    # Copy of such a part, once it is back, to memory in which it has its strides.
    scatter: Stretch | None = None


class GroupTape(NamedTuple):
    """A group, in forward order."""

    name: str
    payloads: tuple[int, ...]  # numbers of the tape's payloads, first saved first
    copies: Stretch | None = None  # of parameters that recipes need, made if the group leaves


class Stretch(NamedTuple):
    """Operators on the compute stream, and device memory, between two events of the engine."""

    seconds: tuple[float, ...]  # of each operator
    nbytes: int  # device memory allocated in total; below 0 if more was freed
    rise: int  # highest device memory during the stretch, above that at its begin; at least 0

    @classmethod
    def joined(cls, events: Iterable[Event]) -> Stretch:
        """Join the stretches among events that follow each other."""
        seconds: list[float] = []
        nbytes = rise = 0
        for event in events:
            if isinstance(event, Stretch):
                seconds += event.seconds
                rise = max(rise, nbytes + event.rise)
                nbytes += event.nbytes
        return cls(tuple(seconds), nbytes, rise)


class Mark(NamedTuple):
    """A point of the program that the engine sees.

    ========= ==================================================================================
    kind      at this point
    ========= ==================================================================================
    begin     a group starts
    end       a group is committed
    drop      the program releases a source; autograd and copies may still hold it
    use       backward asks for a payload
    lose      backward releases the tensor that it was given, and still holds a view of it
    release   backward releases the memory that it was given
    gone      autograd will not ask for the payload again
    ========= ==================================================================================
    """

    kind: str  # name of the method of NumberChunk that is called
    number: int  # position of the group, or number of the source or of the payload
    # Number of the payload's use in its chunk, counted through both parts of a backward. Events
    # that compute a payload again have numbers of their own.
    use: int = 0


Event = Stretch | Mark


class Repeated(NamedTuple):
    """Events of work that is done again and again: a backward, a part of it, or an update."""

    # A step's first backward makes gradients that later ones add to, the first update makes the
    # state of an optimizer.
    first: tuple[Event, ...] = ()
    later: tuple[Event, ...] = ()


@dataclass(frozen=True)
class Tape:
    """A chunk of one stage."""

    groups: tuple[GroupTape, ...]
    payloads: tuple[Payload, ...]
    source_bytes: tuple[int, ...]
    """Device memory of each source."""

    forward: tuple[Event, ...]
    backward: Mapping[str, Repeated]
    """Backwards of the stage by kind of action: in one part (``FULL_BACKWARD``), or in two, those
    of inputs first (``BACKWARD_INPUT``, ``BACKWARD_WEIGHT``).
    """

    reduce: tuple[Event, ...]
    """Events when all backwards of the stage are over."""

    sent_bytes: int
    """Bytes that a microbatch sends to the next stage."""

    sent_back_bytes: int
    """Bytes that a microbatch sends to the stage before."""

    def copied(self, group: GroupTape) -> list[Payload]:
        """Return the payloads that are copied if a group of the tape leaves."""
        payloads = [self.payloads[index] for index in group.payloads]
        return [payload for payload in payloads if payload.again is None]

    def nbytes(self, group: GroupTape) -> int:
        """Return the bytes that a group of the tape may send."""
        return sum([payload.nbytes for payload in self.copied(group)])


class Candidate(NamedTuple):
    """A group with something to move, which may stay."""

    nbytes: int
    stage: int
    name: str
    position: int

    @property
    def place(self) -> Place:
        return Place(self.stage, self.position)

    @property
    def kind(self) -> tuple[int, int, str]:
        """Size, stage and name, which are equal for groups that take the same memory."""
        return self.nbytes, self.stage, self.name


@dataclass(frozen=True)
class RankTapes:
    """Tapes of a rank's stages, and of its optimizer."""

    stages: dict[int, Tape]
    resident_bytes: int
    """Device memory at the begin of the first step: parameters, and buffers of the schedule."""

    update: Repeated = Repeated()
    """Work of an optimizer at the end of a step; empty without an optimizer."""

    recomputed: tuple[tuple[str, ...], ...] = ()
    """Names of the layers that backward recomputes, by virtual stage."""

    num_layers: int = 0
    """Number of layers that the rank could recompute, these included."""

    variant: Callable[[int], RankTapes] | None = field(default=None, compare=False, repr=False)
    """Function that records the rank with a number of layers recomputed; None without layers."""

    @property
    def state_bytes(self) -> int:
        """Device memory of the optimizer from the end of the first step on."""
        return Stretch.joined(self.update.first).nbytes

    @property
    def places(self) -> tuple[Place, ...]:
        """Places of all groups with something to move, the first saved first."""
        return tuple(group.place for group in first_saved(self))

    def planned(self, stay: Container[tuple[int, int]]) -> tuple[tuple[PlannedGroup, ...], ...]:
        """Make planned groups: those at these places, by stage and position, stay, others leave."""
        return tuple(
            tuple(
                PlannedGroup(group.name, tape.nbytes(group), (stage, position) in stay)
                for position, group in enumerate(tape.groups)
            )
            for stage, tape in sorted(self.stages.items())
        )

    def with_state(self) -> RankTapes:
        """Make the tapes of later steps, at whose begin the optimizer has its state."""
        resident_bytes = self.resident_bytes + self.state_bytes
        update = Repeated(self.update.later, self.update.later)
        return replace(self, resident_bytes=resident_bytes, update=update)

    def recomputing(self, num: int) -> RankTapes:
        """Return the same rank with ``num`` of its ``num_layers`` recomputed, spread evenly."""
        return self if self.variant is None else self.variant(num)


def first_saved(tapes: RankTapes) -> list[Candidate]:
    """List groups with something to move, the first saved first."""
    return [
        Candidate(tape.nbytes(group), stage, group.name, position)
        for stage, tape in sorted(tapes.stages.items())
        for position, group in enumerate(tape.groups)
        if group.payloads
    ]
