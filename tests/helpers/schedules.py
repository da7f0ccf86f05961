"""Schedules of ``torch.distributed.pipelining``, each with how many stages a rank has."""

from __future__ import annotations

ONE_STAGE = [("gpipe", 1), ("1f1b", 1)]

SEVERAL = [
    (name, virtual)
    for name in ("interleaved1f1b", "loopedbfs", "interleavedzerobubble")
    for virtual in (1, 2, 3)
]

V_SHAPED = [("zbv", 2), ("dualpipev", 2)]

ALL = [*ONE_STAGE, *SEVERAL, *V_SHAPED, ("csv", 2)]
