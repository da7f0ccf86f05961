"""Steps of a trace by rank: times, waits by cause, rates and peaks; and beside their plan.

On a virtual device the end of the last work of compute is compared with the plan of the rank. On
other devices only the time to the next step is known, with waits for other ranks, and is compared
with the step of the whole pipeline.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from pp_offload._common.offload_plan import OffloadPlan, RankPlan
from pp_offload._common.text import GB, GIB, format_table
from pp_offload._groups.plan import OTHERS_ON_A_CPU
from pp_offload.trace import timeline as tl
from pp_offload.trace.timeline import Span, Timeline

Interval = tuple[float, float]


class Kind(enum.Enum):
    """Kind of a span, as legends and tables show it."""

    OPERATORS = "other compute"
    FORWARD = "forward"
    BACKWARD = "backward"
    OFFLOAD = "offload (d2h)"
    RELOAD = "reload (h2d)"
    WRITE = "write to disk"
    READ = "read from disk"
    WAITS_FOR_RELOAD = "waits for a reload"
    WAITS_FOR_OFFLOAD = "waits for an offload"
    WAITS_FOR_DISK = "waits for a disk"
    WAITS_FOR_RANK = "waits for other ranks"


WAITS_FOR_COPIES = (Kind.WAITS_FOR_RELOAD, Kind.WAITS_FOR_OFFLOAD, Kind.WAITS_FOR_DISK)
WAITS = (*WAITS_FOR_COPIES, Kind.WAITS_FOR_RANK)
COPIES = (Kind.OFFLOAD, Kind.RELOAD, Kind.WRITE, Kind.READ)
_KEYS = [tl.OPERATORS, "(forward)", "(backward)", tl.D2H, tl.H2D, "write", "read", "(reload)"]
_KEYS += ["(offload)", tl.WAITS_FOR_UNKNOWN, tl.WAITS_FOR_OTHERS]
_KINDS = dict(zip(_KEYS, Kind, strict=True))  # by track, name or last word of a span


def merged(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """Sort intervals, and join those that overlap or are at most ``gap`` apart."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1] + gap:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def common(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """Return the intersection of two sets of intervals."""
    sets = (*merged(a), *merged(b))
    edges = [edge for begin, end in sets for edge in ((begin, 1), (end, -1))]
    both, depth, begin = [], 0, 0.0
    for at, sign in sorted(edges):
        if depth == 2 and begin < at:
            both.append((begin, at))
        depth, begin = depth + sign, at
    return both


@dataclass(frozen=True)
class RankStep:
    """One step of one rank, in seconds and bytes: to the next step, or the recording's end.

    ``facts`` are the arguments of the step's span, and ``spans``, by kind, those that begin in the
    step. Times of groups' compute are those of operators, where known, as on a virtual device.
    ``values`` has the times and values of each counter, also at the begin and at the end.
    """

    rank: int
    begin_s: float
    end_s: float
    facts: Mapping[str, Any]
    spans: dict[Kind, list[Span]]
    times: dict[Kind, list[Interval]]
    values: dict[str, list[tuple[float, int]]]

    def seconds_of(self, *kinds: Kind) -> float:
        """Sum the times of these kinds."""
        return sum(end - begin for kind in kinds for begin, end in self.times[kind])

    def copied(self, kind: Kind) -> tuple[int, float | None]:
        """Return bytes of copies, writes or reads begun in the step; and bytes a second, if any."""
        nbytes = sum(span.args["bytes"] for span in self.spans[kind])
        seconds = sum(span.end_s - span.begin_s for span in self.spans[kind])
        return nbytes, nbytes / seconds if seconds else None

    @property
    def worked_s(self) -> float | None:
        """From the begin to the end of the last work; None except for a virtual device."""
        work = self.times[Kind.OPERATORS]
        return work[-1][1] - self.begin_s if work else None

    @property
    def waited_s(self) -> dict[Kind, float]:
        """Time in which compute waited, by cause."""
        return {kind: self.seconds_of(kind) for kind in WAITS}

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Most bytes of each counter; of the device, also between readings, if known."""
        peaks = {name: max(n for _, n in line) for name, line in self.values.items() if line}
        if "device_peak_bytes" in self.facts:
            peaks[tl.DEVICE] = max(peaks.get(tl.DEVICE, 0), self.facts["device_peak_bytes"])
        return peaks

    def as_dict(self) -> dict[str, Any]:
        """Make plain figures, which JSON can hold."""
        copied = {kind: self.copied(kind) for kind in COPIES}
        return {
            "rank": self.rank,
            "seconds": self.end_s - self.begin_s,
            "busy_s": self.seconds_of(Kind.OPERATORS) or None,
            "worked_s": self.worked_s,
            "waited_s": {kind.value: seconds for kind, seconds in self.waited_s.items()},
            "copied_bytes": {kind.value: nbytes for kind, (nbytes, _) in copied.items()},
            "bytes_per_s": {kind.value: rate for kind, (_, rate) in copied.items()},
            "on_demand_reloads": self.facts.get("on_demand_reloads"),
            "peak_bytes": self.peak_bytes,
        }


def numbers_of_steps(timeline: Timeline) -> list[int]:
    """List the numbers of the steps, each once."""
    return sorted({int(span.args["step"]) for span in timeline.spans if span.track == tl.STEPS})


def rank_steps(timeline: Timeline, step: int | None = None) -> dict[int, RankStep]:
    """Return the step of each rank that has it; the last step for None.

    Raises:
        ValueError: The trace has no such step, or none at all.
    """
    steps = numbers_of_steps(timeline)
    if not steps:
        raise ValueError("the trace has no step, expected one that ended while it was recorded")
    if step is not None and step not in steps:
        raise ValueError(f"step is {step}, expected one of the trace: {steps}")
    number = steps[-1] if step is None else step
    spans = [each for rank in timeline.ranks for each in timeline.of(rank, tl.STEPS)]
    return {each.rank: _rank_step(timeline, each) for each in spans if each.args["step"] == number}


def _rank_step(timeline: Timeline, step: Span) -> RankStep:
    rank, begin_s, end_s = step.rank, step.begin_s, step.end_s
    later = [each.begin_s for each in timeline.of(rank, tl.STEPS) if each.begin_s > begin_s]
    until_s = min(later, default=inf)  # copies of the last step may begin behind its compute
    inside: dict[Kind, list[Span]] = {kind: [] for kind in Kind}
    times: dict[Kind, list[Interval]] = {kind: [] for kind in Kind}
    for span in timeline.spans:
        keys = span.track, span.name, span.name.split(" ")[-1]
        kind = next((_KINDS[key] for key in keys if key in _KINDS), None)
        if span.rank == rank and kind is not None:
            times[kind].append((span.begin_s, span.end_s))
            if begin_s <= span.begin_s < until_s:
                inside[kind].append(span)
    times = {kind: common(each, [(begin_s, end_s)]) for kind, each in times.items()}
    for kind in (Kind.FORWARD, Kind.BACKWARD) if times[Kind.OPERATORS] else ():
        times[kind] = common(times[kind], times[Kind.OPERATORS])
    values = {}
    for name in tl.COUNTERS:
        line = [(s.time_s, s.nbytes) for s in timeline.counter(rank, name) if s.time_s < end_s]
        before = [(begin_s, nbytes) for time_s, nbytes in line if time_s <= begin_s][-1:]
        line = before + [sample for sample in line if sample[0] > begin_s]
        values[name] = line + [(end_s, nbytes) for _, nbytes in line[-1:]]
    return RankStep(rank, begin_s, end_s, step.args, inside, times, values)


# Beside a plan

TOLERANCE, MS = 0.02, 1e-3

NOTE = """\
Planned / traced; - is what a trace does not say. step: until compute of the rank ends on a virtual
device, else until the next step, beside that of the pipeline. stalled: compute waits for copies. on
demand: tensors that came back only when backward was at their group. sent: to the host, at GB/s."""

WHY = {  # causes by figure
    "peak_bytes": "memory that the plan does not know, as an optimizer's state without --optimizer",
    "host_peak_bytes": "more of what left was there at the same time",
    "step_s": "longer compute or waits, or more than the schedule in a step, such as an optimizer",
    "busy_s": "operators take other times than planned; plan again with a Hardware of other "
    "matmul_fraction and memory_fraction",
    "stalled_s": "copies came at other times, as with other bounds on what is on its way",
    "on_demand_reloads": "copies came too late, as with other bounds on what is on its way",
    "bytes_offloaded": "groups do not leave as planned; give the run the length "
    f"and the options of the plan; {OTHERS_ON_A_CPU}",
    "offload_bytes_per_s": "the link, or host memory that several devices share; plan again with a "
    "Hardware of other link_bytes_per_s",
}


class Pair(NamedTuple):
    """Planned and traced value of a figure, with column and unit; None is unknown."""

    name: str
    head: str
    unit: float
    planned: float | None
    traced: float | None

    def texts(self) -> tuple[str, str]:
        """Format the planned and the traced value in the unit."""
        return _text(self.planned, self.unit), _text(self.traced, self.unit)


@dataclass(frozen=True)
class RankCompared:
    """Comparison of a rank with its plan; ``differences`` say what is worse, and why."""

    rank: int
    planned: RankPlan
    traced: RankStep
    pairs: list[Pair]
    differences: list[str]


@dataclass(frozen=True)
class Compared:
    """Comparison of all ranks of a trace with their plan."""

    step: int
    planned_s: float
    ranks: list[RankCompared]

    @property
    def is_as_planned(self) -> bool:
        """True if nothing is worse than planned, and the plan is for this run."""
        return not any(rank.differences for rank in self.ranks)

    def table(self) -> str:
        """Format a row for each rank, and below what is worse than planned."""
        rows = [["rank", *(pair.head for pair in self.ranks[0].pairs)]]
        for rank in self.ranks:
            rows.append([str(rank.rank), *(" / ".join(pair.texts()) for pair in rank.pairs)])
        step_s = max(p.traced or 0 for rank in self.ranks for p in rank.pairs if p.name == "step_s")
        title = f"step {self.step}: {_text(step_s, MS)} ms, planned {_text(self.planned_s, MS)}"
        texts = [f"rank {rank.rank}: {text}" for rank in self.ranks for text in rank.differences]
        texts = texts or [f"nothing is worse than planned by more than {TOLERANCE:.0%}"]
        return "\n".join([title, "", format_table(rows), NOTE, "", *texts])

    def figures(self) -> dict[str, Any]:
        """Make plain values, in seconds and bytes, for a file."""
        ranks = [
            {
                "rank": rank.rank,
                "planned": {pair.name: pair.planned for pair in rank.pairs},
                "found": {pair.name: pair.traced for pair in rank.pairs},
                "differences": rank.differences,
            }
            for rank in self.ranks
        ]
        return {"step": self.step, "as_planned": self.is_as_planned, "ranks": ranks}


def compare_with_plan(
    plan: OffloadPlan,
    timeline: Timeline,
    *,
    step: int | None = None,
    pipeline_rank: Callable[[int], int] = int,
) -> Compared:
    """Compare a step with its plan.

    Args:
        plan: Plan that the run followed.
        timeline: One rank or several; see :func:`pp_offload.trace.read`.
        step: Number of the step; the last one when None. In the first step of a run an optimizer
            has no state yet.
        pipeline_rank: Pipeline rank of a rank of the trace, where a run has other dimensions of
            parallelism.

    Raises:
        ConfigError: The plan has fewer ranks.
        ValueError: The trace has no such step.
    """
    ranks = []
    for rank, traced in rank_steps(timeline, step).items():
        planned = plan.rank(pipeline_rank(rank))
        pairs = _pairs(plan, planned, traced)
        has_graphs = timeline.metadata[rank].get("has_captures")  # whose groups are not in it
        differences = [] if has_graphs else [*_strangers(plan, planned, traced)]
        differences += _worse(plan, pairs)
        ranks.append(RankCompared(rank, planned, traced, pairs, differences))
    return Compared(ranks[0].traced.facts["step"], plan.seconds, ranks)


def _pairs(plan: OffloadPlan, planned: RankPlan, traced: RankStep) -> list[Pair]:
    peaks, on_demand = traced.peak_bytes, traced.facts.get("on_demand_reloads")
    step_s = plan.seconds, traced.end_s - traced.begin_s
    if traced.worked_s is not None:
        step_s = planned.seconds, traced.worked_s
    stalled_s = traced.seconds_of(*WAITS_FOR_COPIES)
    rate = planned.bytes_offloaded / planned.offload_s if planned.offload_s else None
    sent_bytes, sent_rate = traced.copied(Kind.OFFLOAD)
    return [
        Pair("peak_bytes", "peak GiB", GIB, planned.peak_bytes, peaks.get(tl.DEVICE)),
        Pair("host_peak_bytes", "host GiB", GIB, planned.host_peak_bytes, peaks.get(tl.HOST)),
        Pair("step_s", "step ms", MS, *step_s),
        Pair("busy_s", "busy ms", MS, planned.busy_s, traced.seconds_of(Kind.OPERATORS) or None),
        Pair("stalled_s", "stalled ms", MS, planned.stalled_s, stalled_s),
        Pair("on_demand_reloads", "on demand", 1, planned.on_demand_reloads, on_demand),
        Pair("bytes_offloaded", "sent GiB", GIB, planned.bytes_offloaded, sent_bytes),
        Pair("offload_bytes_per_s", "GB/s", GB, rate, sent_rate),
    ]


def _worse(plan: OffloadPlan, pairs: list[Pair]) -> Iterator[str]:
    """List figures that are worse by more than the tolerance; fewer sent bytes count as well."""
    for pair in pairs:
        texts = pair.texts()
        if pair.planned is None or pair.traced is None or texts[0] == texts[1]:
            continue
        more = pair.traced - pair.planned
        more = {"bytes_offloaded": abs(more), "offload_bytes_per_s": -more}.get(pair.name, more)
        if more > TOLERANCE * (plan.seconds if pair.name == "stalled_s" else pair.planned):
            yield f"{pair.head} {texts[1]}, planned {texts[0]}: {WHY[pair.name]}"


def _strangers(plan: OffloadPlan, planned: RankPlan, traced: RankStep) -> Iterator[str]:
    """List the first group that differs from the plan, and a difference of microbatches."""
    spans = [span for span in traced.spans[Kind.FORWARD] if "position" in span.args]
    names = {
        (span.args["vp_stage"], span.args["position"]): span.name.removesuffix(" (forward)")
        for span in spans
    }
    expected = {
        (vp_stage, position): group.name
        for vp_stage, stage in enumerate(planned.stages)
        for position, group in enumerate(stage)
        if group.nbytes or (vp_stage, position) in names  # without bytes it may have no span
    }
    for place, _ in sorted(set(names.items()) ^ set(expected.items()))[:1]:
        group = f"group {place[1]} of stage {place[0]} is {names.get(place)}"
        yield f"the plan is of another model or schedule: {group}, planned {expected.get(place)}"
    num = len({span.args["microbatch"] for span in spans})
    num_planned = plan.options.get("num_microbatches")
    if num and num_planned not in (None, num):
        yield f"the plan is of {num_planned} microbatches in a step, which has {num}"


def _text(value: float | None, unit: float) -> str:
    if value is None or unit == 1:
        return "-" if value is None else str(value)
    number = value / unit
    if number >= 100 or not number:
        return f"{number:.1f}"
    return f"{number:.3f}" if number >= 0.1 else f"{number:.3g}"
