"""A step of a trace beside the plan that it was to follow.

compared = compare_with_plan(OffloadPlan.load("plan.json"), read("out.json.gz"))
print(compared.table())
compared.is_as_planned
compared.ranks[0].differences
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from pp_offload._common.offload_plan import OffloadPlan
from pp_offload._common.tables import format_table
from pp_offload.trace.events import DEVICE, HOST, Timeline
from pp_offload.trace.figures import (
    RankFigures,
    checked_step,
    figures_of,
    spans_by_rank,
    steps_of,
)
from pp_offload.trace.groups import TOLERANCE, GroupsSeen, groups_in, strangers_of, why_other_bytes
from pp_offload.trace.planned_rank import (
    HOST_PEAK,
    ON_DEMAND,
    PEAK,
    RATE,
    SENT,
    STALLED,
    STEP,
    RankCompared,
    ms,
)

HEAD = ("rank", PEAK, HOST_PEAK, STEP, STALLED, ON_DEMAND, SENT, RATE)

NOTE = """\
Planned / found; - is what the trace does not say. host: the most in any step up to this one. step:
until the rank's compute ends, which virtual devices say; of others until the next step begins,
beside the pipeline's. stalled: ms of it in which compute stands still for copies. on demand:
tensors that came only when backward was at their group. sent: copied to the host. GB/s: while it
was."""


@dataclass(frozen=True)
class Compared:
    """All ranks that a trace has."""

    step: int
    ranks: list[RankCompared]

    @property
    def is_as_planned(self) -> bool:
        """Whether nothing is worse than planned, and the plan is of what ran."""
        return all(one.is_as_planned for one in self.ranks)

    def table(self) -> str:
        """As text: a row for each rank, and what is not as planned below."""
        rows = [(str(one.rank), *one.row()) for one in self.ranks]
        lines = [f"rank {one.rank}: {text}" for one in self.ranks for text in one.differences]
        return "\n".join(
            [
                f"step {self.step}{self._of_the_pipeline()}",
                "",
                format_table([HEAD, *rows]),
                NOTE,
                "",
                *lines,
                *self._closing(),
            ]
        )

    def _of_the_pipeline(self) -> str:
        """Its step, which ends with the last rank's."""
        if not self.ranks:
            return ""
        found_s = max(one.found_step_s for one in self.ranks)
        return f": {ms(found_s)} ms, planned {ms(self.ranks[0].planned_s)}"

    def _closing(self) -> Iterator[str]:
        """What may be said of all figures."""
        if not self.is_as_planned:
            return
        if any(pair.is_worse for one in self.ranks for pair in one.pairs):
            yield f"nothing is worse than planned by more than {TOLERANCE:.0%} of a step"
        elif any(one.differs for one in self.ranks):
            yield f"nothing is worse than planned by more than {TOLERANCE:.0%}"
        else:
            yield f"nothing differs by more than {TOLERANCE:.0%}"

    def figures(self) -> dict[str, Any]:
        """Plain values, in seconds and bytes, for a file."""
        return {
            "step": self.step,
            "as_planned": self.is_as_planned,
            "ranks": [
                {
                    "rank": one.rank,
                    "planned": _planned_figures(one),
                    "found": _found_figures(one),
                    "differences": one.differences,
                }
                for one in self.ranks
            ],
        }


def compare_with_plan(
    plan: OffloadPlan,
    timeline: Timeline,
    *,
    step: int | None = None,
    pipeline_rank: Callable[[int], int] = int,
) -> Compared:
    """What a step was to cost, and what it did.

    Args:
        plan: Which the run has followed.
        timeline: Of one rank or of several; see :func:`pp_offload.trace.read`.
        step: Of the trace; the last one when None. In a run's first step an optimizer has no state
            yet.
        pipeline_rank: Of a rank of the trace; the same number unless there are other dimensions
            of parallelism.

    Raises:
        ConfigError: The plan has fewer ranks.
        ValueError: The trace has no such step.
    """
    number = checked_step(timeline, step)
    spans, windows = spans_by_rank(timeline), steps_of(timeline)[number]
    return Compared(
        number,
        [
            _rank(
                plan,
                pipeline_rank(one.rank),
                _with_earlier_steps(timeline, one, windows[one.rank][1]),
                groups_in(spans[one.rank], windows[one.rank]),
                has_groups=not timeline.metadata.get(one.rank, {}).get("has_captures"),
            )
            for one in figures_of(timeline, number)
        ],
    )


def _rank(
    plan: OffloadPlan,
    pipeline_rank: int,
    found: RankFigures,
    seen: GroupsSeen,
    *,
    has_groups: bool,
) -> RankCompared:
    """One rank; what was captured into a graph has no groups in a trace."""
    planned = plan.rank(pipeline_rank)
    return RankCompared(
        found.rank,
        planned,
        plan.seconds,
        found,
        strangers_of(planned, plan.options, seen, found.offloaded_bytes) if has_groups else (),
        why_other_bytes(planned, seen),
        plan.options,
    )


def _with_earlier_steps(timeline: Timeline, found: RankFigures, end_s: float) -> RankFigures:
    """With the host's peak in any step so far, which is what a plan has."""
    samples = timeline.counter(found.rank, HOST)
    most = max((one.nbytes for one in samples if one.time_s < end_s), default=None)
    peaks = {} if most is None else {HOST: most}
    return replace(found, peak_bytes={**found.peak_bytes, **peaks})


def _planned_figures(one: RankCompared) -> dict[str, Any]:
    known = {key: value for key, value in asdict(one.planned).items() if key not in PARTS}
    return known | {"step_s": one.planned_step_s, "offload_bytes_per_s": one.planned_rate}


def _found_figures(one: RankCompared) -> dict[str, Any]:
    found = one.found
    return {
        "peak_bytes": found.peak_bytes.get(DEVICE),
        "host_peak_bytes": found.peak_bytes.get(HOST),
        "busy_s": found.busy_s,
        "stalled_s": one.found_stalled_s,
        "bytes_offloaded": found.offloaded_bytes,
        "on_demand_reloads": found.on_demand_reloads,
        "offload_s": found.offload_s,
        "step_s": one.found_step_s,
        "offload_bytes_per_s": found.offload_bytes_per_s,
    }


PARTS = ("stages", "recomputed")
"""Of a plan, that are no figures."""
