"""What a chunk does on the device, as numbers in the order in which the host asks for it.

A tape is recorded once and played for every microbatch. What it does not say is what the engine
decides: whether a group leaves, when its sources go and when its payloads come back.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import NamedTuple

from pp_offload._common.offload_plan import PlannedGroup


class Again(NamedTuple):
    """An operator that runs again in backward, in place of a copy of what it made."""

    seconds: tuple[float, ...]
    nbytes: int
    """Device memory of what it makes."""

    rise: int
    """The most that there is on the way."""

    inputs: tuple[int | Again, ...]
    """Payloads and what is made of them, in the order in which they are asked for."""


class Payload(NamedTuple):
    """Bytes that a group saves, and may send away."""

    nbytes: int
    """That are copied, or computed again."""

    source: int
    """Which of the tape's sources it is in."""

    num_uses: int
    """How often backward is expected to ask for it."""

    version: int | None = None
    """Of the source when it was saved, by a number: groups that saved the same one share a copy.
    None where it is not shared.
    """

    again: Again | None = None
    """How it is computed again where its group leaves; then it is not copied."""

    gather_s: float | None = None
    """Of a part of its source that only recipes ask for: how long compute takes to take it out."""


class GroupTape(NamedTuple):
    """A group, in forward order."""

    name: str
    payloads: tuple[int, ...]
    """Of the tape's payloads, first saved first."""

    copies: Stretch | None = None
    """Of parameters, which recipes need: made once in a step, if the group leaves."""


class Stretch(NamedTuple):
    """Operators on the compute stream, and device memory, between what the engine hears of."""

    seconds: tuple[float, ...]
    """Of each operator."""

    nbytes: int
    """Device memory that there is more in the end; below 0 if there is less."""

    rise: int
    """The most that there is more on the way; 0 if there never is."""


class Open(NamedTuple):
    """A group starts."""

    group: int


class Close(NamedTuple):
    """A group is committed."""

    group: int


class Drop(NamedTuple):
    """The program has let go of a source; autograd and copies may still hold it."""

    source: int


class Use(NamedTuple):
    """Backward asks for a payload."""

    payload: int


class Release(NamedTuple):
    """Backward has let go of the memory that it was given."""

    payload: int

    use: int
    """By which use of the payload in its chunk, from 0; parts of a backward count on."""


class Lost(NamedTuple):
    """Backward has let go of the tensor that it was given, and still has a view of its memory."""

    payload: int
    use: int
    """As of :class:`Release`."""


class Gone(NamedTuple):
    """Autograd will not ask for it any more."""

    payload: int


Event = Stretch | Open | Close | Drop | Use | Lost | Release | Gone


class Backward(NamedTuple):
    """What makes gradients of parameters."""

    first: tuple[Event, ...] = ()
    """For the first microbatch, which makes the gradients that the others add to."""

    later: tuple[Event, ...] = ()


@dataclass(frozen=True)
class Tape:
    """A chunk of one stage."""

    groups: tuple[GroupTape, ...]
    payloads: tuple[Payload, ...]
    source_bytes: tuple[int, ...]
    """Device memory of each source."""

    forward: tuple[Event, ...]
    backward: Backward
    """In one part; empty where the schedule has none of the stage, as are the others."""

    input_part: tuple[Event, ...]
    """The first part of one in two, which makes gradients of inputs alone."""

    weight_part: Backward
    """The second part."""

    reduce: tuple[Event, ...]
    """When all backwards of the stage are over."""

    sent_bytes: int
    """What the next stage gets for a microbatch."""

    sent_back_bytes: int
    """What the stage before gets."""

    @property
    def num_events(self) -> int:
        """Of a microbatch."""
        parts = len(self.input_part) + len(self.weight_part.later)
        return len(self.forward) + max(len(self.backward.later), parts)

    def nbytes(self, group: GroupTape) -> int:
        """What a group of it may send."""
        payloads = [self.payloads[index] for index in group.payloads]
        return sum([payload.nbytes for payload in payloads if payload.again is None])


class Update(NamedTuple):
    """What an optimizer does at the end of a step; nothing where there is none."""

    first: tuple[Stretch, ...] = ()
    """In the first step, in which it makes its state."""

    later: tuple[Stretch, ...] = ()

    @property
    def state_bytes(self) -> int:
        """Device memory that it has from the first step on."""
        return sum(stretch.nbytes for stretch in self.first)


@dataclass(frozen=True)
class RankTapes:
    """All that a rank does."""

    stages: dict[int, Tape]
    resident_bytes: int
    """Device memory at the begin of the first step: parameters, and what the schedule allocates."""

    update: Update = Update()

    recomputed: tuple[tuple[str, ...], ...] = ()
    """Names of the layers that backward recomputes, by virtual stage."""

    num_layers: int = 0
    """How many it could recompute, with these."""

    min_offloaded_tensor_size: int | None = None
    """The option of this name that they were recorded with; None where nobody has said it."""

    variant: Callable[[int], RankTapes] | None = field(default=None, compare=False, repr=False)
    """Records the rank anew with so many of its layers recomputed; None where it has none."""

    def planned(self, stay: Container[tuple[int, int]]) -> tuple[tuple[PlannedGroup, ...], ...]:
        """Its groups, where those at these places stay and all others leave.

        Args:
            stay: Number of a stage and position in it, of each.
        """
        return tuple(
            tuple(
                PlannedGroup(group.name, tape.nbytes(group), (stage, position) in stay)
                for position, group in enumerate(tape.groups)
            )
            for stage, tape in sorted(self.stages.items())
        )

    def recomputing(self, num: int) -> RankTapes:
        """The same rank where backward recomputes ``num`` of its layers, spread evenly.

        Raises:
            ValueError: It has fewer that may be recomputed.
        """
        if not 0 <= num <= self.num_layers:
            raise ValueError(
                f"{num} layers are to be recomputed, expected 0 to {self.num_layers}; name them "
                'with Modules(layers="layers.*")'
            )
        return self if self.variant is None else self.variant(num)
