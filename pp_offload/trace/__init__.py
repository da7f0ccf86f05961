"""What happened in a step, as a timeline: groups, copies, waits and bytes, for Perfetto.

    with Trace("out.json.gz", steps=range(2, 4)):
        train()

    timeline = read("out.json.gz")            # as Python has it
    merge_ranks(parts, "all.json.gz")         # one file for all ranks
    merge("all.json.gz", [profiled], "both.json.gz")  # with that of torch.profiler, on one axis
    compare_with_plan(plan, timeline).table()         # planned and found

It listens: nothing in the package knows of it, and what it does not hear costs nothing.
"""

from __future__ import annotations

from pp_offload.trace.against_plan import Compared, RankCompared, compare_with_plan
from pp_offload.trace.chrome import read, write
from pp_offload.trace.events import Flow, Point, Sample, Span, Timeline
from pp_offload.trace.merge import merge, merge_ranks
from pp_offload.trace.parts import part_of
from pp_offload.trace.session import Trace

__all__ = [
    "Compared",
    "Flow",
    "Point",
    "RankCompared",
    "Sample",
    "Span",
    "Timeline",
    "Trace",
    "compare_with_plan",
    "merge",
    "merge_ranks",
    "part_of",
    "read",
    "write",
]
