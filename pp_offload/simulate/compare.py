"""A step of a pipeline without offload and one with it: run, as a table, and as figures.

found = compare(order, work, DEVICES["H100"], config=OffloadConfig())
found.table(DEVICES["H100"].memory_bytes)
json.dumps(found.figures())
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from pp_offload._common.offload_plan import OffloadPlan
from pp_offload._common.tables import format_table
from pp_offload._megatron.manager import PipelineOffloadManager
from pp_offload.config import OffloadConfig
from pp_offload.simulate.device import VirtualBackend
from pp_offload.simulate.hardware import Hardware
from pp_offload.simulate.messages import PeerLink
from pp_offload.simulate.orders import PipelineOrder
from pp_offload.simulate.pipeline import Progress, Watcher, run_pipeline
from pp_offload.simulate.rank import PipelineStep, RankStep
from pp_offload.simulate.stages import Modules, Work

GIB, MIB = 2**30, 2**20

WORTH_A_WORD = 0.02
"""A step that is so much longer with offload, as a part of it."""

HEAD = ("rank", "peak GiB ", "with ", "host GiB", "sent GiB", "step ms", "with")
HEAD_OF_STEP = ("busy", "stalled", "waited", "most for")

NOTE = """\
The first peak and the first step are those without offload, all else is with it. busy, stalled and
waited: ms in which compute worked, stood still for copies, and for messages of other ranks."""


@dataclass(frozen=True)
class Comparison:
    """What both steps cost."""

    without: PipelineStep
    with_offload: PipelineStep
    limit_bytes: int | None = None
    """Of the plan that was followed; None without one."""

    caution: str = ""
    """What the plan counts that is not there, or the other way round; empty if nothing."""

    def table(self, memory_bytes: int) -> str:
        """As text: a row for each rank.

        Args:
            memory_bytes: What a device has; peaks above it are marked.
        """
        ranks = zip(self.without.ranks, self.with_offload.ranks, strict=True)
        rows = [_row(number, *both, memory_bytes) for number, both in enumerate(ranks)]
        lines = [
            *(
                f"{name}: {step.seconds * 1e3:.1f} ms a step, compute idle for {step.bubble:.1%} "
                "of it"
                for name, step in self._named.items()
            ),
            "",
            format_table([HEAD + HEAD_OF_STEP, *rows]),
            NOTE,
        ]
        all_ranks = [*self.without.ranks, *self.with_offload.ranks]
        if any(rank.peak_bytes > memory_bytes for rank in all_ranks):
            lines.append(f"* more than the {memory_bytes / GIB:.0f} GiB that the device has")
        if self.limit_bytes is not None:
            lines.append(self._beside_the_limit(self.limit_bytes))
            lines += [self.caution] if self.caution else []
        elif self.worse:
            lines.append(
                f"Offload costs more than it has to: {', '.join(self.worse)}. `pp-offload plan` "
                "says what is to\nleave for a limit, and what better stays."
            )
        return "\n".join(lines)

    @property
    def above_the_limit(self) -> dict[int, int]:
        """Bytes that ranks have above the limit of the plan, by rank; of those that have some."""
        if self.limit_bytes is None:
            return {}
        above = {
            number: rank.peak_bytes - self.limit_bytes
            for number, rank in enumerate(self.with_offload.ranks)
        }
        return {number: nbytes for number, nbytes in above.items() if nbytes > 0}

    @property
    def worse(self) -> list[str]:
        """What is worse with offload than without, in words: a longer step, and higher peaks."""
        longer = self.with_offload.seconds / self.without.seconds - 1
        ranks = zip(self.without.ranks, self.with_offload.ranks, strict=True)
        higher = [
            f"rank {number} has a higher peak"
            for number, (none, ours) in enumerate(ranks)
            if ours.peak_bytes > none.peak_bytes
        ]
        return ([f"a step is {longer:.0%} longer"] if longer > WORTH_A_WORD else []) + higher

    def _beside_the_limit(self, limit_bytes: int) -> str:
        above = [
            f"rank {number} by {nbytes / MIB:.1f} MiB"
            for number, nbytes in self.above_the_limit.items()
        ]
        limit = f"The plan's limit is {limit_bytes / GIB:.2f} GiB"
        if above:
            return f"{limit}; above it {'is' if len(above) == 1 else 'are'} {', '.join(above)}."
        return f"{limit}, and no rank is above it."

    def figures(self) -> dict[str, Any]:
        """Plain values, for a file."""
        limit = {} if self.limit_bytes is None else {"limit_bytes": self.limit_bytes}
        caution = {"caution": self.caution} if self.caution else {}
        return {**limit, **caution} | {
            name: {
                "seconds": step.seconds,
                "bubble": step.bubble,
                "ranks": [
                    _figures(rank) | {"waits_most_for": rank.waits_most_for} for rank in step.ranks
                ],
            }
            for name, step in self._named.items()
        }

    @property
    def _named(self) -> dict[str, PipelineStep]:
        return {"without offload": self.without, "with offload": self.with_offload}


def compare(
    order: PipelineOrder,
    work: Work,
    hardware: Hardware,
    *,
    config: OffloadConfig,
    peers: PeerLink | None = None,
    progress: Callable[[str], Progress | None] | None = None,
    trace: Watcher | None = None,
) -> Comparison:
    """Run both.

    Args:
        order, work, hardware, peers: As for :func:`run_pipeline`.
        config: Of the run with offload.
        progress: Gets the name of a run, and gives what is called after each of its actions.
        trace: Records the run with offload.
    """

    def told(name: str) -> Progress | None:
        return None if progress is None else progress(name)

    # Without offload there is no plan, which the engine would derive from a first step. But an
    # optimizer makes its state at the end of that.
    num_steps = 2 if isinstance(work, Modules) and work.optimizer is not None else 1
    without = run_pipeline(
        order, work, hardware, peers=peers, num_steps=num_steps, progress=told("without offload")
    )
    seen = _StateSeen(trace)
    with_offload = run_pipeline(
        order,
        work,
        hardware,
        peers=peers,
        config=config,
        progress=told("with offload"),
        trace=seen,
    )
    plan = config.offload_plan
    if plan is None:
        return Comparison(without, with_offload)
    caution = _caution(plan, has_state=seen.has_state)
    return Comparison(without, with_offload, plan.limit_bytes, caution)


class _StateSeen:
    """Sees whether optimizers have a state when a run ends. What records it does so all the same.

    Args:
        trace: What records it, if anything does.
    """

    def __init__(self, trace: Watcher | None) -> None:
        self.has_state = False
        self._trace = trace

    @contextmanager
    def ranks(self, managers: Sequence[PipelineOffloadManager]) -> Iterator[None]:
        with nullcontext() if self._trace is None else self._trace.ranks(managers):
            yield
        backends = [manager.backend for manager in managers]
        self.has_state = any(
            isinstance(one, VirtualBackend) and one.memory.live["optimizer"] for one in backends
        )


def _caution(plan: OffloadPlan, *, has_state: bool) -> str:
    is_planned = any(rank.optimizer_bytes for rank in plan.ranks)
    if is_planned and not has_state:
        return (
            "The plan counts the state of an optimizer, and this run has none: give the "
            "--optimizer of the plan, or plan again without."
        )
    if has_state and not is_planned:
        return (
            "This run has the state of an optimizer, which the plan does not count: plan again "
            "with the same --optimizer."
        )
    return ""


def _row(number: int, none: RankStep, ours: RankStep, memory_bytes: int) -> tuple[str, ...]:
    peer = ours.waits_most_for
    seconds = ours.seconds, ours.busy_s, ours.stalled_s, sum(ours.waited_s.values())
    return (
        str(number),
        _peak(none, memory_bytes),
        _peak(ours, memory_bytes),
        f"{ours.host_peak_bytes / GIB:.2f}",
        f"{ours.bytes_offloaded / GIB:.2f}",
        f"{none.seconds * 1e3:.1f}",
        *(f"{one * 1e3:.1f}" for one in seconds),
        "-" if peer is None else f"rank {peer}",
    )


def _figures(rank: RankStep) -> dict[str, Any]:
    """All but the bounds, which a rank was given."""
    return {name: value for name, value in asdict(rank).items() if name != "bounds"}


def _peak(rank: RankStep, memory_bytes: int) -> str:
    mark = " " if rank.peak_bytes <= memory_bytes else "*"
    return f"{rank.peak_bytes / GIB:.2f}{mark}"
