"""Comparison of a pipeline's steps without and with offload, as a table and as figures.

both = compare(order, work, DEVICES["H100"], config=OffloadConfig())
both.table(DEVICES["H100"].memory_bytes)
json.dumps(both.figures())
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pp_offload._common.text import format_table, size_cell, size_text
from pp_offload.config import OffloadConfig
from pp_offload.simulate.hardware import Hardware
from pp_offload.simulate.pipeline import PeerLink, PipelineStep, RankStep, run_pipeline
from pp_offload.simulate.schedules import PipelineOrder
from pp_offload.simulate.stages import Work

HEAD = "rank,peak GiB ,with ,host GiB,sent GiB,step ms,with,busy,stalled,waited,most for".split(",")

NOTE = """\
The first peak and the first step are those without offload, all else is with it. busy, stalled and
waited: ms in which compute worked, stood still for copies, and for messages of other ranks; most
for: the rank that it waited for longest."""


@dataclass(frozen=True)
class Comparison:
    """Costs of a step without offload and of a step with it."""

    without: PipelineStep
    with_offload: PipelineStep
    limit_bytes: int | None = None  # of the followed plan; None without a plan

    def table(self, memory_bytes: int) -> str:
        """Format a row for each rank. Peaks above ``memory_bytes`` of a device are marked."""
        ranks = [*zip(self.without.ranks, self.with_offload.ranks, strict=True)]
        lines = [
            f"{name}: {step.seconds * 1e3:.1f} ms a step, compute idle for {step.bubble:.1%} of it"
            for name, step in self._named.items()
        ]
        rows = [_row(number, *both, memory_bytes) for number, both in enumerate(ranks)]
        lines += ["", format_table([HEAD, *rows]), NOTE]
        if any(rank.peak_bytes > memory_bytes for both in ranks for rank in both):
            lines.append(f"* more than the {memory_bytes / 2**30:.0f} GiB that the device has")
        if self.limit_bytes is not None:
            above = [f"rank {n} by {size_text(more)}" for n, more in self.above_the_limit.items()]
            beside = ", and no rank is above it"
            if above:
                beside = f"; above it {'is' if len(above) == 1 else 'are'} {', '.join(above)}"
            lines.append(f"The plan's limit is {size_text(self.limit_bytes)}{beside}.")
        return "\n".join(lines)

    @property
    def above_the_limit(self) -> dict[int, int]:
        """Return the bytes above the plan's limit, for each rank above it."""
        limit, peaks = self.limit_bytes, [rank.peak_bytes for rank in self.with_offload.ranks]
        if limit is None:
            return {}
        return {number: peak - limit for number, peak in enumerate(peaks) if peak > limit}

    def figures(self) -> dict[str, Any]:
        """Return plain values for a file."""
        figures: dict[str, Any] = {}
        if self.limit_bytes is not None:
            figures["limit_bytes"] = self.limit_bytes
        for name, step in self._named.items():
            ranks = list(map(_figures, step.ranks))
            figures[name] = {"seconds": step.seconds, "bubble": step.bubble, "ranks": ranks}
        return figures

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
    trace: Any = None,
) -> Comparison:
    """Run a step without offload and a step with it, which alone is traced; for the arguments see
    :func:`run_pipeline`.
    """
    # The engine derives its plan from a first step, which a run without offload does not need. But
    # the state of an optimizer exists from the end of the first step on.
    num_steps = 1 if work.optimizer is None else 2
    without = run_pipeline(order, work, hardware, peers=peers, num_steps=num_steps)
    with_offload = run_pipeline(order, work, hardware, peers=peers, config=config, trace=trace)
    plan = config.offload_plan
    return Comparison(without, with_offload, None if plan is None else plan.limit_bytes)


def _row(number: int, none: RankStep, offload: RankStep, memory_bytes: int) -> tuple[str, ...]:
    peer = offload.waits_most_for
    peaks = [
        f"{size_cell(rank.peak_bytes)}{' ' if rank.peak_bytes <= memory_bytes else '*'}"
        for rank in (none, offload)
    ]
    sizes = offload.host_peak_bytes, offload.bytes_offloaded
    seconds = none.seconds, offload.seconds, offload.busy_s, offload.stalled_s
    return (
        *(str(number), *peaks, *map(size_cell, sizes)),
        *(f"{value * 1e3:.1f}" for value in (*seconds, sum(offload.waited_s.values()))),
        "-" if peer is None else f"rank {peer}",
    )


def _figures(rank: RankStep) -> dict[str, Any]:
    """Return all fields but the bounds, which are options."""
    figures = {name: value for name, value in asdict(rank).items() if name != "bounds"}
    return figures | {"waits_most_for": rank.waits_most_for}
