"""What a span of a trace is: work, a copy, or a wait for one of several causes.

kind_of(Span(0, COMPUTE, "waits for mlp (reload)", 1e-3, 2e-3))   # Kind.WAITS_FOR_RELOAD
"""

from __future__ import annotations

import enum

from pp_offload.trace.copy_notes import UNKNOWN
from pp_offload.trace.events import COMPUTE, D2H, DISK, H2D, OPERATORS, Span
from pp_offload.trace.virtual_notes import OTHER_WORK


class Kind(enum.Enum):
    """As legends and tables call it."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPERATORS = "other compute"
    """Of which no group is known."""

    OFFLOAD = "offload (d2h)"
    RELOAD = "reload (h2d)"
    WRITE = "write to disk"
    READ = "read from disk"

    WAITS_FOR_RELOAD = "waits for a reload"
    WAITS_FOR_OFFLOAD = "waits for an offload"
    WAITS_FOR_DISK = "waits for a disk"
    """Or for a copy that was queued before the recording began."""

    WAITS_FOR_RANK = "waits for other ranks"
    """Or for other work that is no copy."""


WAITS_FOR_COPIES = (Kind.WAITS_FOR_RELOAD, Kind.WAITS_FOR_OFFLOAD, Kind.WAITS_FOR_DISK)
WAITS = (*WAITS_FOR_COPIES, Kind.WAITS_FOR_RANK)


def kind_of(span: Span) -> Kind | None:
    """None for a step, and for what is not known."""
    if span.track in (D2H, H2D):
        return Kind.OFFLOAD if span.track == D2H else Kind.RELOAD
    if span.track == OPERATORS:
        return Kind.OPERATORS
    if is_one_of(span.track, DISK):
        return {"write": Kind.WRITE, "read": Kind.READ}.get(span.name)
    if not is_one_of(span.track, COMPUTE):
        return None
    name = span.name
    # The end first: a group may have any name, also one that begins like a wait.
    if name.endswith(" (forward)"):
        return Kind.FORWARD
    if name.endswith(" (backward)"):
        return Kind.BACKWARD
    if name == UNKNOWN:
        return Kind.WAITS_FOR_DISK
    if name == OTHER_WORK:
        return Kind.WAITS_FOR_RANK
    if name.startswith("waits for "):
        return Kind.WAITS_FOR_OFFLOAD if name.endswith("(offload)") else Kind.WAITS_FOR_RELOAD
    return None


def is_one_of(track: str, first: str) -> bool:
    """Whether it is ``compute`` or ``compute 2``, such as ``first`` is ``compute``."""
    return track == first or track.startswith(f"{first} ")
