"""A step of a trace beside the plan that it was to follow.

    compared = compare_with_plan(OffloadPlan.load("plan.json"), read("out.json.gz"))
    print(compared.table())
    compared.ranks[0].differences

NOTE [ Which input was wrong ]
    What a plan says follows from what it was given: a model, times of operators, rates of links,
    and memory that it does not know. Each of these shows in a figure by itself: bytes that were
    copied follow from the model alone, time in which compute works from the operators, the rate of
    a copy from the link. Where all of these are as planned and a peak or waits are not, the cause
    is outside of what a plan looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from pp_offload._common.offload_plan import OffloadPlan, RankPlan
from pp_offload._common.tables import format_table
from pp_offload.trace.events import DEVICE, HOST, Timeline
from pp_offload.trace.figures import RankFigures, checked_step, figures_of
from pp_offload.trace.kinds import WAITS_FOR_COPIES

GIB, GB = 2**30, 10**9

TOLERANCE = 0.02
"""What differs by less is as planned."""

HEAD = ("rank", "peak GiB", "host GiB", "step ms", "stalled ms", "on demand", "sent GiB", "GB/s")

NOTE = """\
Planned / found; - is what the trace does not say. stalled: ms of a step in which compute stands
still for copies. on demand: tensors that came only when backward was at their group. sent: copied
to the host. GB/s: while it was."""


@dataclass(frozen=True)
class RankCompared:
    """One rank. All times are in seconds."""

    rank: int
    """As the trace has it."""

    planned: RankPlan
    planned_s: float
    """Of the whole step: until the last rank's compute has ended."""

    found: RankFigures

    @property
    def found_stalled_s(self) -> float:
        """How long compute waited for copies."""
        return sum(self.found.waited_s[kind] for kind in WAITS_FOR_COPIES)

    @property
    def planned_rate(self) -> float | None:
        """Bytes a second of copies to the host; None where there are none."""
        planned = self.planned
        return planned.bytes_offloaded / planned.offload_s if planned.offload_s else None

    @property
    def differences(self) -> list[str]:
        """What is not as planned, and which input that tells of. See NOTE [ Which input was
        wrong ].
        """
        inputs = [*self._bytes(), *self._compute(), *self._rate()]
        return inputs + [*self._peaks(), *([] if inputs else self._stall())]

    def _bytes(self) -> Iterator[str]:
        planned, found = self.planned.bytes_offloaded, self.found.offloaded_bytes
        if _differ(planned, found):
            yield (
                f"{_gib(found)} GiB left, planned {_gib(planned)}: the step is the first one, in "
                "which all groups leave, or the plan is for another model, schedule, length or "
                "min_offloaded_tensor_size; plan again with those of this run"
            )

    def _compute(self) -> Iterator[str]:
        if self.found.busy_s is not None:
            planned, found = self.planned.busy_s, self.found.busy_s
            what, cause = "compute works for", "operators take other times than planned"
        else:
            planned = self.planned_s - self.planned.stalled_s
            found = self.found.seconds - self.found_stalled_s
            what = "without waits for copies the step takes"
            cause = (
                "operators or messages take other times than planned, or there is more in a step "
                "than its schedule, such as an optimizer"
            )
        if _differ(planned, found):
            yield (
                f"{what} {_ms(found)} ms, planned {_ms(planned)}: {cause}; plan again with a "
                "Hardware of other matmul_fraction and memory_fraction"
            )

    def _rate(self) -> Iterator[str]:
        planned, found = self.planned_rate, self.found.offload_bytes_per_s
        if planned and found and _differ(planned, found):
            yield (
                f"copies to the host run at {_gb(found)} GB/s, planned {_gb(planned)}: the link, "
                "or host memory that several devices share; plan again with a Hardware of other "
                "link_bytes_per_s"
            )

    def _peaks(self) -> Iterator[str]:
        """Lower ones are fine: many devices are only looked at between groups."""
        causes = {
            DEVICE: f"{self._unknown_memory} that a plan does not know; leave room for it below "
            "the limit",
            HOST: "the run has other options for host memory, or other groups leave",
        }
        for counter, planned in self._planned_peaks.items():
            found = self.found.peak_bytes.get(counter)
            if found is not None and found > planned * (1 + TOLERANCE):
                yield (
                    f"{counter} memory has a peak of {_gib(found)} GiB, planned {_gib(planned)}: "
                    f"{causes[counter]}"
                )

    @property
    def _unknown_memory(self) -> str:
        others = "buffers of messages or other memory"
        return others if self.planned.optimizer_bytes else f"the optimizer's state, {others}"

    @property
    def _planned_peaks(self) -> dict[str, int]:
        return {DEVICE: self.planned.peak_bytes, HOST: self.planned.host_peak_bytes}

    def _stall(self) -> Iterator[str]:
        planned, found = self.planned.stalled_s, self.found_stalled_s
        if abs(planned - found) > TOLERANCE * self.planned_s:
            yield (
                f"compute waits {_ms(found)} ms for copies, planned {_ms(planned)}, with bytes, "
                f"compute and rates as planned{self._on_demand()}: the bounds are others; plan "
                "with the max_in_flight_bytes and prefetch_bytes of this run"
            )

    def _on_demand(self) -> str:
        """What came late, where more did than planned."""
        planned, found = self.planned.on_demand_reloads, self.found.on_demand_reloads
        if planned is None or found is None or found <= planned:
            return ""
        return f", and {found} tensors on demand, planned {planned}"

    def row(self) -> tuple[str, ...]:
        """Of a table, without its rank."""
        found, planned = self.found, self.planned
        peaks = [
            _both(nbytes, found.peak_bytes.get(counter), _gib)
            for counter, nbytes in self._planned_peaks.items()
        ]
        return (
            *peaks,
            _both(self.planned_s, found.seconds, _ms),
            _both(planned.stalled_s, self.found_stalled_s, _ms),
            _both(planned.on_demand_reloads, found.on_demand_reloads, str),
            _both(planned.bytes_offloaded, found.offloaded_bytes, _gib),
            _both(self.planned_rate, found.offload_bytes_per_s, _gb),
        )


@dataclass(frozen=True)
class Compared:
    """All ranks that a trace has."""

    step: int
    ranks: list[RankCompared]

    def table(self) -> str:
        """As text: a row for each rank, and what is not as planned below."""
        rows = [(str(one.rank), *one.row()) for one in self.ranks]
        lines = [f"rank {one.rank}: {text}" for one in self.ranks for text in one.differences]
        agree = f"nothing differs by more than {TOLERANCE:.0%}"
        return "\n".join(
            [f"step {self.step}", "", format_table([HEAD, *rows]), NOTE, "", *(lines or [agree])]
        )

    def figures(self) -> dict[str, Any]:
        """Plain values, in seconds and bytes, for a file."""
        return {
            "step": self.step,
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
    ranks = [
        RankCompared(one.rank, plan.rank(pipeline_rank(one.rank)), plan.seconds, one)
        for one in figures_of(timeline, number)
    ]
    return Compared(number, ranks)


def _planned_figures(one: RankCompared) -> dict[str, Any]:
    known = {key: value for key, value in asdict(one.planned).items() if key not in PARTS}
    return known | {"step_s": one.planned_s, "offload_bytes_per_s": one.planned_rate}


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
        "step_s": found.seconds,
        "offload_bytes_per_s": found.offload_bytes_per_s,
    }


PARTS = ("stages", "recomputed")
"""Of a plan, that are no figures."""


def _differ(planned: float, found: float) -> bool:
    return abs(planned - found) > TOLERANCE * planned


def _both(planned: float | None, found: float | None, shown: Callable[[float], str]) -> str:
    return " / ".join("-" if one is None else shown(one) for one in (planned, found))


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.3f}"


def _gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / GB:.1f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
