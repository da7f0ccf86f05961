"""What a trace says: spans, samples of counters, and flows. How it is written is ``chrome.py``'s.

    timeline = Timeline(base_ns=0)
    timeline.spans.append(Span(0, COMPUTE, "mlp (forward)", 1e-3, 2e-3))
    timeline.of(0, COMPUTE)

All times are in seconds since the timeline's base: one clock for all ranks and all tracks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

STEPS, COMPUTE, OPERATORS = "steps", "compute", "operators"
D2H, H2D, DISK = "d2h", "h2d", "disk"
TRACKS = (STEPS, COMPUTE, OPERATORS, D2H, H2D, DISK)
"""In the order in which they are shown; further compute streams, and what a disk does at the same
time, come behind them."""

DEVICE, HOST, IN_FLIGHT, RELOADED = "device", "host", "in flight", "reloaded"
COUNTERS = (DEVICE, HOST, IN_FLIGHT, RELOADED)
"""Of bytes; ``docs/trace.md`` says of which."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time."""

    rank: int
    track: str
    name: str
    begin_s: float
    end_s: float
    args: Mapping[str, Any] = field(default_factory=dict)
    """What else is known of it: plain values by name."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What a counter said, from that time on."""

    rank: int
    counter: str
    time_s: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Point:
    """A place of a flow: inside the span of that track at that time."""

    track: str
    time_s: float


@dataclass(frozen=True, slots=True)
class Flow:
    """The way of a group's bytes: their copy off the device, that back, their first use."""

    rank: int
    name: str
    points: tuple[Point, ...]
    """At least two, in order."""


@dataclass
class Timeline:
    """All that a trace says."""

    base_ns: int
    """What times count from, in nanoseconds of the wall clock; 0 for a virtual run's own begin."""

    spans: list[Span] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    flows: list[Flow] = field(default_factory=list)
    metadata: dict[int, dict[str, Any]] = field(default_factory=dict)
    """What there is to know of each rank's recording, by rank."""

    @property
    def ranks(self) -> list[int]:
        """In order."""
        return sorted(self.metadata)

    def of(self, rank: int, track: str) -> list[Span]:
        """The spans of a track, first begun first."""
        found = [one for one in self.spans if one.rank == rank and one.track == track]
        return sorted(found, key=lambda one: (one.begin_s, -one.end_s))

    def counter(self, rank: int, name: str) -> list[Sample]:
        """The samples of a counter, in order."""
        found = [one for one in self.samples if one.rank == rank and one.counter == name]
        return sorted(found, key=lambda one: one.time_s)

    def based_on(self, base_ns: int) -> Timeline:
        """The same at the same time, counted from another base."""
        if base_ns == self.base_ns:
            return self
        by_s = (self.base_ns - base_ns) / 1e9
        return Timeline(
            base_ns,
            [
                replace(one, begin_s=one.begin_s + by_s, end_s=one.end_s + by_s)
                for one in self.spans
            ],
            [replace(one, time_s=one.time_s + by_s) for one in self.samples],
            [
                replace(
                    one, points=tuple(replace(at, time_s=at.time_s + by_s) for at in one.points)
                )
                for one in self.flows
            ],
            self.metadata,
        )


def joined(timelines: Iterable[Timeline]) -> Timeline:
    """Several ranks as one, on the earliest base of theirs.

    Raises:
        ValueError: There is none, or two are of the same rank.
    """
    parts = list(timelines)
    if not parts:
        raise ValueError("no trace to merge, expected one for each rank")
    whole = Timeline(min(part.base_ns for part in parts))
    for part in parts:
        both = whole.metadata.keys() & part.metadata.keys()
        if both:
            raise ValueError(f"rank {min(both)} is in two of the traces, expected each rank once")
        moved = part.based_on(whole.base_ns)
        whole.spans += moved.spans
        whole.samples += moved.samples
        whole.flows += moved.flows
        whole.metadata |= part.metadata
    return whole
