"""Memory of the device in one step, and where its peaks are.

    seen = StepMemory(allocated)
    seen.note(backend.allocated())      # at each group, or where backward goes on to another chunk
    peaks.of_step(seen, largest_bytes)

NOTE [ What a peak does not say ]
    A device reports its peak since the last reset, and only the user resets it. This peak may come
    from another program, from loading a checkpoint, or from an evaluation behind the last backward,
    when no group is there: only a peak that rose where groups begin, end and are reached is a
    step's. So the allocated bytes are also read at these times, and, as long as no peak rose, the
    bytes of the largest group are left free for what comes and goes in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pp_offload._core.keys import ChunkKey, Place
from pp_offload._groups.demand import Beside
from pp_offload._groups.plan import ChunksInFlight
from pp_offload.backends import Allocated

GIB = 2**30


@dataclass
class StepMemory:
    """Memory of the device in a step so far. All but counts in bytes."""

    begin: Allocated
    """Figures of the device when the step began."""

    begin_bytes: int
    """Allocated at that time, without copies in flight."""

    reported_bytes: int = 0
    """Peak of the device, as of the last reading; its user resets it."""

    peak_bytes: int = 0
    """Peak of the step: the highest reading, or the device's peak where that rose."""

    has_risen: bool = False
    """Whether the device's own peak rose in the step."""

    is_of_loss: bool = False
    """Whether it rose behind the last group of a forward, and before its backward."""

    is_behind_forward: bool = False
    """Whether a group was closed last."""

    num_retries: int = 0
    """How often the allocator had given memory back before the first group."""

    had_retries: bool = False
    """Whether it did so in the step."""

    allocated_bytes: int = 0
    """Most allocated bytes when a backward went on to another chunk."""

    besides_copies: dict[ChunksInFlight, int] = field(default_factory=dict)
    """The same without copies in flight, for each set of chunks in flight."""

    begun: set[ChunkKey] = field(default_factory=set)
    """Chunks whose forward has begun."""

    in_flight: set[ChunksInFlight] = field(default_factory=set)
    """Chunks in flight, each time that another forward began."""

    beside: dict[Place, Beside] = field(default_factory=dict)
    """Bytes of groups that do not move."""

    in_backward: ChunkKey | None = None
    """The chunk that backward reached last."""

    def __post_init__(self) -> None:
        self.reported_bytes, self.num_retries = self.begin.peak_bytes, self.begin.num_retries

    def note(self, now: Allocated, *, is_of_loss: bool = False) -> None:
        """See NOTE [ What a peak does not say ]."""
        if now.peak_bytes > self.reported_bytes:
            self.reported_bytes = self.peak_bytes = now.peak_bytes
            self.has_risen, self.is_of_loss = True, is_of_loss
        self.peak_bytes = max(self.peak_bytes, now.nbytes)
        self.had_retries = now.num_retries > self.num_retries

    def note_chunk(self, now: ChunksInFlight, allocated_bytes: int, at_rest_bytes: int) -> None:
        """Backward goes on to another chunk; without copies in flight the second is allocated."""
        self.allocated_bytes = max(self.allocated_bytes, allocated_bytes)
        self.besides_copies[now] = max(self.besides_copies.get(now, 0), at_rest_bytes)

    def fixed_bytes(self, staying: Mapping[int, int]) -> int:
        """The most at these times, less copies and so many bytes that stay for each chunk."""
        return max(
            (
                nbytes - sum(num * staying.get(stage, 0) for stage, num in now)
                for now, nbytes in self.besides_copies.items()
            ),
            default=0,
        )


class Peaks:
    """Tells peaks of steps from those between steps."""

    def __init__(self) -> None:
        self._reported_bytes = 0  # by the device, behind the last step
        self._outside_bytes = 0  # its peak, where that rose between two steps
        self._risen_bytes = 0  # the peak within the last step in which it rose
        self._is_of_loss = False

    def begin(self, reported_bytes: int) -> None:
        """A step begins: what rose before was of no step."""
        if reported_bytes > self._reported_bytes:
            self._reported_bytes = self._outside_bytes = reported_bytes

    def end(self, seen: StepMemory) -> None:
        """The step is over."""
        self._reported_bytes = seen.reported_bytes

    def forget(self) -> None:
        """Steps are of other sizes from now on."""
        self._risen_bytes = 0

    def of_step(self, seen: StepMemory, largest_bytes: int) -> int:
        """The peak of a step that was read, in which the largest group has so many bytes."""
        if seen.has_risen:
            self._risen_bytes, self._is_of_loss = seen.peak_bytes, seen.is_of_loss
        if self._risen_bytes:
            return max(seen.peak_bytes, self._risen_bytes)
        return seen.peak_bytes + largest_bytes

    def elsewhere(self, peak_bytes: int) -> str:
        """Where the device's peak is, if it is not this one, or not in a group; for a message."""
        if self._outside_bytes > peak_bytes:
            return (
                f"the most, {self._outside_bytes / GIB:.2f} GiB, is taken outside of groups, by "
                "an optimizer, an evaluation, or loading"
            )
        if self._is_of_loss:
            return "that is behind the last group's forward: the model's head, or its loss"
        return ""
