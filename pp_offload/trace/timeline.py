"""Records of a trace: spans, and samples of counters.

    timeline.of(0, "d2h")          # copies of rank 0 to the host, in order
    timeline.counter(0, "host")    # bytes of its host memory over time

All times are seconds since the base of the timeline: one clock for all ranks and tracks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

STEPS, COMPUTE, OPERATORS = "steps", "compute", "operators"
D2H, H2D, DISK = "d2h", "h2d", "disk"
TRACKS = (STEPS, COMPUTE, OPERATORS, D2H, H2D, DISK)
"""Tracks in the order of display; others come after them."""

DEVICE, HOST, IN_FLIGHT, RELOADED = "device", "host", "in flight", "reloaded"
COUNTERS = (DEVICE, HOST, IN_FLIGHT, RELOADED)

WAITS_FOR_UNKNOWN = "waits for a disk or an older copy"
WAITS_FOR_OTHERS = "waits for other work"


@dataclass(frozen=True, slots=True)
class Span:
    """Span of work, of a copy or of a wait; ``args`` are plain values, such as ``bytes``."""

    rank: int
    track: str
    name: str
    begin_s: float
    end_s: float
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """Value of a counter from a time on."""

    rank: int
    counter: str
    time_s: float
    nbytes: int


@dataclass
class Timeline:
    """Content of a trace.

    Attributes:
        base_ns: Wall clock at second 0, in nanoseconds; 0 for a virtual run.
        metadata: Facts of each rank: ``device``, ``num_ranks``, ``has_captures``.
    """

    base_ns: int
    spans: list[Span] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    metadata: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def ranks(self) -> list[int]:
        return sorted(self.metadata)

    def of(self, rank: int, track: str) -> list[Span]:
        """List the spans of a track, sorted by begin."""
        spans = [span for span in self.spans if (span.rank, span.track) == (rank, track)]
        return sorted(spans, key=lambda span: (span.begin_s, -span.end_s))

    def counter(self, rank: int, name: str) -> list[Sample]:
        """List the samples of a counter, sorted by time."""
        samples = [item for item in self.samples if (item.rank, item.counter) == (rank, name)]
        return sorted(samples, key=lambda item: item.time_s)

    def add(self, other: Timeline) -> None:
        """Add the ranks of another timeline with the same base.

        Raises:
            ValueError: Both have the same rank.
        """
        if both := self.metadata.keys() & other.metadata.keys():
            raise ValueError(f"rank {min(both)} is in two of the traces, expected each rank once")
        self.spans += other.spans
        self.samples += other.samples
        self.metadata |= other.metadata
