"""One rank of a trace beside its plan: each figure as planned and as found, and what differs.

    one = RankCompared(0, plan.rank(0), plan.seconds, found)
    one.row()             # of a table
    one.differences       # what is not as planned, and which input that tells of

NOTE [ Which input was wrong ]
    What a plan says follows from what it was given: a model, times of operators, rates of links,
    and memory that it does not know. Each of these shows in a figure by itself: bytes that were
    copied follow from the model alone, time in which compute works from the operators, the rate of
    a copy from the link. Where all of these are as planned and a peak or waits are not, the cause
    is outside of what a plan looks at.

NOTE [ Like with like ]
    A virtual device says when a rank's compute last worked in a step: that is beside what the rank
    was to take. Of other devices only the time from one step to the next is known, in which a rank
    also waits for the others: that is beside the pipeline's step. Host memory is the most in any
    step up to this one, as a plan has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pp_offload._common.offload_plan import RankPlan
from pp_offload.trace.events import DEVICE, HOST, IN_FLIGHT, RELOADED
from pp_offload.trace.figures import RankFigures
from pp_offload.trace.groups import TOLERANCE
from pp_offload.trace.kinds import WAITS_FOR_COPIES

GIB, GB = 2**30, 10**9

PEAK, HOST_PEAK, STEP, STALLED = "peak GiB", "host GiB", "step ms", "stalled ms"
ON_DEMAND, SENT, RATE = "on demand", "sent GiB", "GB/s"

BOUNDS = {IN_FLIGHT: "max_in_flight_bytes", RELOADED: "prefetch_bytes"}
"""The option that says how much of a counter there may be."""


@dataclass(frozen=True)
class Pair:
    """A figure as planned and as found; None is what is not known."""

    head: str
    """Of its column."""

    planned: float | None
    found: float | None
    shown: Callable[[float], str]
    is_worse_below: bool = False
    """Whether less is worse."""

    @property
    def is_other(self) -> bool:
        """Whether it differs by more than the tolerance, and one can see it."""
        planned, found = self.planned, self.found
        if planned is None or found is None or self.shown(planned) == self.shown(found):
            return False
        return abs(planned - found) > TOLERANCE * planned

    @property
    def is_worse(self) -> bool:
        """Whether it does so to the worse."""
        planned, found = self.planned, self.found
        if planned is None or found is None or not self.is_other:
            return False
        return found < planned if self.is_worse_below else found > planned

    def texts(self) -> tuple[str, str]:
        """What was planned, and what was found."""
        planned, found = (
            "-" if one is None else self.shown(one) for one in (self.planned, self.found)
        )
        return planned, found

    def __str__(self) -> str:
        return " / ".join(self.texts())


@dataclass(frozen=True)
class Difference:
    """What is not as planned."""

    text: str
    is_worse: bool = True
    """Whether it makes a step or a peak worse, by more than the tolerance."""


@dataclass(frozen=True)
class RankCompared:
    """One rank. All times are in seconds."""

    rank: int
    """As the trace has it."""

    planned: RankPlan
    planned_s: float
    """Of the pipeline's step: until the last rank's compute has ended."""

    found: RankFigures
    strangers: tuple[str, ...] = ()
    """What says that the plan is of another model, schedule or length."""

    why_sent: str = ""
    """What groups did where other bytes left than planned, as far as the trace says it."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """That the plan was made with."""

    @property
    def planned_step_s(self) -> float:
        """See NOTE [ Like with like ]."""
        return self.planned_s if self.found.worked_s is None else self.planned.seconds

    @property
    def found_step_s(self) -> float:
        """See NOTE [ Like with like ]."""
        return self.found.seconds if self.found.worked_s is None else self.found.worked_s

    @property
    def found_stalled_s(self) -> float:
        """How long compute waited for copies."""
        return sum(self.found.waited_s[kind] for kind in WAITS_FOR_COPIES)

    @property
    def planned_rate(self) -> float | None:
        """Bytes a second of copies to the host; None where there are none."""
        planned = self.planned
        return planned.bytes_offloaded / planned.offload_s if planned.offload_s else None

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """All that a row has."""
        planned, found = self.planned, self.found
        peaks = found.peak_bytes
        return (
            Pair(PEAK, planned.peak_bytes, peaks.get(DEVICE), gib),
            Pair(HOST_PEAK, planned.host_peak_bytes, peaks.get(HOST), gib),
            Pair(STEP, self.planned_step_s, self.found_step_s, ms),
            Pair(STALLED, planned.stalled_s, self.found_stalled_s, ms),
            Pair(ON_DEMAND, planned.on_demand_reloads, found.on_demand_reloads, str),
            Pair(SENT, planned.bytes_offloaded, found.offloaded_bytes, gib),
            Pair(RATE, self.planned_rate, found.offload_bytes_per_s, gb, is_worse_below=True),
        )

    def row(self) -> tuple[str, ...]:
        """Of a table, without its rank."""
        return tuple(map(str, self.pairs))

    @property
    def differences(self) -> list[str]:
        """What is not as planned, and which input that tells of. See NOTE [ Which input was
        wrong ].
        """
        return [one.text for one in self.found_differences]

    @property
    def differs(self) -> bool:
        """Whether anything is not as planned, to the better or to the worse."""
        return bool(self.found_differences) or any(pair.is_other for pair in self.pairs)

    @property
    def is_as_planned(self) -> bool:
        """Whether nothing is worse than planned, and the plan is of what ran."""
        return not any(one.is_worse for one in self.found_differences)

    @cached_property
    def found_differences(self) -> tuple[Difference, ...]:
        """As :attr:`differences`, each with whether it is to the worse."""
        others = [Difference(text) for text in self.strangers]
        inputs = [*others, *self._sent(), *self._compute(), *self._rate()]
        is_known = not inputs  # then a peak and waits have that cause
        rest = (self._peak(), self._host_peak(), self._step(), self._stall(is_known=is_known))
        outcomes = [one for each in (*rest, self._on_demand()) for one in each]
        return (*inputs, *outcomes)

    def _pair(self, head: str) -> Pair:
        (found,) = (pair for pair in self.pairs if pair.head == head)
        return found

    def _sent(self) -> Iterator[Difference]:
        pair = self._pair(SENT)
        if pair.is_other:
            planned, found = pair.texts()
            text = f"{found} GiB left, planned {planned}{self._because(self.why_sent)}"
            yield Difference(text, pair.is_worse)

    def _compute(self) -> Iterator[Difference]:
        if self.found.busy_s is not None:
            what = "compute works for"
            pair = Pair("", self.planned.busy_s, self.found.busy_s, ms)
            cause = "operators take other times than planned"
        else:
            what = "without waits for copies the step takes"
            planned_s = self.planned_step_s - self.planned.stalled_s
            pair = Pair("", planned_s, self.found_step_s - self.found_stalled_s, ms)
            cause = (
                "operators or messages take other times than planned, or there is more in a step "
                "than its schedule, such as an optimizer"
            )
        if pair.is_other:
            planned, found = pair.texts()
            advice = "plan again with a Hardware of other matmul_fraction and memory_fraction"
            why = self._because(f"{cause}; {advice}")
            yield Difference(f"{what} {found} ms, planned {planned}{why}", pair.is_worse)

    def _rate(self) -> Iterator[Difference]:
        pair = self._pair(RATE)
        if pair.is_other:
            planned, found = pair.texts()
            why = self._because(
                "the link, or host memory that several devices share; plan again with a Hardware "
                "of other link_bytes_per_s"
            )
            text = f"copies to the host run at {found} GB/s, planned {planned}{why}"
            yield Difference(text, pair.is_worse)

    def _peak(self) -> Iterator[Difference]:
        """Lower ones are fine, for many devices are only looked at between groups, unless one tells
        that a part of the plan is not there.
        """
        yield from self._above(PEAK, DEVICE, self._why_peak())
        pair, state_bytes = self._pair(PEAK), self.planned.optimizer_bytes
        found_bytes = self.found.peak_bytes.get(DEVICE)
        if not state_bytes or found_bytes is None or not pair.is_other:
            return
        if self.planned.peak_bytes - found_bytes >= (1 - TOLERANCE) * state_bytes:
            planned, found = pair.texts()
            yield Difference(
                f"device memory has a peak of {found} GiB, planned {planned}, of that "
                f"{gib(state_bytes)} for an optimizer's state: this run has none, or none yet; "
                "where it never has one, plan without --optimizer",
                is_worse=False,
            )

    def _host_peak(self) -> Iterator[Difference]:
        why = "more of what left was there at the same time"
        yield from self._above(HOST_PEAK, HOST, why)

    def _above(self, head: str, counter: str, why: str) -> Iterator[Difference]:
        pair = self._pair(head)
        if pair.is_worse:
            planned, found = pair.texts()
            because = self._because("" if self._pair(SENT).is_other else why)
            yield Difference(
                f"{counter} memory has a peak of {found} GiB, planned {planned}{because}"
            )

    def _why_peak(self) -> str:
        """What was on its way then, as far as it is known."""
        at_peak = self.found.at_peak_bytes
        groups = [group.nbytes for stage in self.planned.stages for group in stage]
        one_more = max(groups, default=0)  # may be on its way, whatever the bound
        for counter, name in BOUNDS.items():
            most, found = self._bound(name), at_peak.get(counter, 0)
            if most is not None and found > most + one_more:
                how = "was in flight" if counter == IN_FLIGHT else "was back ahead of its use"
                return f"more {how}, {gib(found)} GiB, than the plan's {name}, {gib(most)}"
        why = "memory that the plan does not know"
        if not self.planned.optimizer_bytes:
            why += "; it was made without an optimizer's state, --optimizer"
        if at_peak:
            back, gone = at_peak.get(RELOADED, 0), at_peak.get(IN_FLIGHT, 0)
            why += f"; {gib(gone)} GiB were in flight then and {gib(back)} back ahead of their use"
        return why

    def _bound(self, name: str) -> int | None:
        """Of what is on its way, where the plan says it."""
        in_flight, ahead = self.planned.max_in_flight_bytes, self.planned.prefetch_bytes
        found = {"max_in_flight_bytes": in_flight, "prefetch_bytes": ahead}[name]
        given = self.options.get(name)  # of an older plan, which has none of its own
        return given if found is None and isinstance(given, int) else found

    def _step(self) -> Iterator[Difference]:
        pair = self._pair(STEP)
        if pair.is_worse:
            planned, found = pair.texts()
            yield Difference(f"the step takes {found} ms, planned {planned}{self._why_step()}")

    def _why_step(self) -> str:
        """The parts that are longer; waits for other ranks are what is left."""
        whole_s = self.found_step_s - self.planned_step_s
        waits_s = self.found_stalled_s - self.planned.stalled_s
        parts = {"waits for copies": waits_s}
        if self.found.busy_s is None:
            parts["all but waits for copies"] = whole_s - waits_s
        else:
            parts["compute"] = busy_s = self.found.busy_s - self.planned.busy_s
            parts["waits for other ranks"] = whole_s - waits_s - busy_s
        longer = {name: one for name, one in parts.items() if one > TOLERANCE * whole_s}
        why = ", ".join(f"{ms(one)} ms more of {name}" for name, one in longer.items())
        return f": {why}" if why else ""

    def _stall(self, *, is_known: bool) -> Iterator[Difference]:
        pair = self._pair(STALLED)
        if not pair.is_worse:
            return
        planned, found = pair.texts()
        text = f"compute waits {found} ms for copies, planned {planned}"
        more_s = self.found_stalled_s - self.planned.stalled_s
        if more_s <= TOLERANCE * self.planned_s:
            share = f"{more_s / self.planned_s:.1%}"
            yield Difference(f"{text}, which is {share} of a step more", is_worse=False)
        else:
            yield Difference(text + (self._why_stall() if is_known else ""))

    def _why_stall(self) -> str:
        given = [f"{name} {self.options[name]}" for name in BOUNDS.values() if name in self.options]
        made_with = f"; the plan was made with {' and '.join(given)}" if given else ""
        return (
            ", with bytes, compute and rates as planned: copies came at other times, as with other "
            f"bounds on what is on its way{made_with}"
        )

    def _on_demand(self) -> Iterator[Difference]:
        pair = self._pair(ON_DEMAND)
        if pair.is_worse:
            planned, found = pair.texts()
            some = "tensor" if found == "1" else "tensors"
            yield Difference(f"{found} {some} came only on demand, planned {planned}")

    def _because(self, why: str) -> str:
        """For the end of a text; of another model nothing else needs a cause."""
        return f": {why}" if why and not self.strangers else ""


def gib(nbytes: float) -> str:
    """In GiB, without the unit."""
    number = nbytes / GIB
    return f"{number:.3f}" if number >= 0.1 or not number else f"{number:.3g}"


def gb(bytes_per_s: float) -> str:
    """In GB/s, without the unit."""
    return _number(bytes_per_s / GB)


def ms(seconds: float) -> str:
    """In ms, without the unit."""
    return _number(seconds * 1e3)


def _number(number: float) -> str:
    """With three digits that count, or more."""
    if number >= 10 or not number:
        return f"{number:.1f}"
    return f"{number:.2f}" if number >= 1 else f"{number:.3f}"
