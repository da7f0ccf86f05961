"""What is noted while a step runs: events that are still to come, and no time yet.

Notes are plain and few, for they are taken between the program's own work. ``assembled.py`` makes
a timeline of them when all is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from pp_offload._core.group import Counts, GroupState
from pp_offload._core.keys import GroupKey
from pp_offload.backends import TimedEvent


class Work(NamedTuple):
    """Work of a virtual stream, in seconds of its own clock."""

    ready_s: float
    """When nothing but other streams kept it waiting."""

    begin_s: float
    end_s: float


@dataclass(slots=True, eq=False)
class CopyNote:
    """Copies that were queued together."""

    label: str
    to_host: bool
    begin: TimedEvent
    end: TimedEvent
    nbytes: int
    num_payloads: int
    works: tuple[Work, ...] = ()
    """Of a virtual stream, each copy."""

    came_from: tuple[CopyNote, ...] = ()
    """Of a reload: the copies that had brought its bytes to the host, as far as they were noted."""

    used_on: int = -1
    """Of a reload: the lane of its first use."""

    used: TimedEvent | None = None


class WaitNote(NamedTuple):
    """A wait of compute for copies."""

    lane: int
    name: str
    begin: TimedEvent
    end: TimedEvent


class Stall(NamedTuple):
    """Time in which a virtual compute stream had work and waited."""

    name: str
    begin_s: float
    end_s: float


class DiskNote(NamedTuple):
    """What a thread of the disk did, by ``perf_counter``."""

    name: str
    nbytes: int
    begin_s: float
    end_s: float


class Known(NamedTuple):
    """What is known of a group, none of which keeps a tensor."""

    name: str
    key: GroupKey | None
    state: GroupState | None
    counts: Counts | None
    """What it says when all is over counts."""

    def args(self) -> dict[str, Any]:
        """For a span."""
        found: dict[str, Any] = {}
        if self.key is not None:
            chunk = self.key.chunk
            found = {"microbatch": chunk.microbatch, "vp_stage": chunk.vp_stage}
            found["position"] = self.key.position
        if self.state is not None and self.counts is not None:
            found |= {"state": self.state.value, "bytes": self.counts.copied_bytes}
        return found


NO_GROUP = Known("", None, None, None)


class Mark(NamedTuple):
    """A point of a compute stream at which a group changed."""

    lane: int
    what: str
    """``opened``, ``closed`` or ``reached``; ``over`` ends all that is still going on."""

    at: TimedEvent
    number: int
    """The group's own, from open to close."""

    group: Known


@dataclass(slots=True)
class StepNote:
    """Where a step begins."""

    number: int
    at: TimedEvent
    peak_bytes: int | None = None
    """The most that was allocated in it, where that is known."""

    on_demand_reloads: int = 0
    """Payloads that came only when backward was at their group."""


class Sampled(NamedTuple):
    """Counters, as the host knew them when it queued this point of compute."""

    at: TimedEvent
    nbytes: dict[str, int]


class Room:
    """How much may still be noted.

    Args:
        most: So many events of the file.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.is_full = False
        self._left = most

    def takes(self, num: int) -> bool:
        """Whether there is room for a note that becomes so many events; never again after a no."""
        self.is_full = self.is_full or self._left < num
        if not self.is_full:
            self._left -= num
        return not self.is_full
