"""Timeline of steps: groups, copies, waits and bytes, for Perfetto::

    with Trace("out.json.gz", steps=range(2, 4)):
        train()

    timeline = read("out.json.gz")                    # or read(*files of ranks)
    compare_with_plan(plan, timeline).table()         # planned and traced

A trace listens: no other part of the package imports it, and without a trace it costs nothing.
"""

from __future__ import annotations

from pp_offload.trace.figures import Compared, RankCompared, compare_with_plan
from pp_offload.trace.recorder import Trace
from pp_offload.trace.timeline import Sample, Span, Timeline, merge_ranks, part_of, read, write

__all__ = [
    "Compared",
    "RankCompared",
    "Sample",
    "Span",
    "Timeline",
    "Trace",
    "compare_with_plan",
    "merge_ranks",
    "part_of",
    "read",
    "write",
]
