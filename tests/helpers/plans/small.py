"""Random pipelines in which options leave to a plan what stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from helpers.plans.random_pipelines import Drawn, draw_pipeline
from pp_offload.plan import RankTapes, predict, record


def planned(
    seed: int,
    *,
    layers: str | None = None,
    schedules: Sequence[type] | None = None,
    rematerialize: str = "cheap",
) -> tuple[Drawn, list[RankTapes]]:
    """A pipeline, and its tapes; ``layers`` is a pattern of what may be recomputed."""
    drawn = draw_pipeline(seed, schedules=schedules)
    drawn.work.layers = layers
    config = replace(
        drawn.config,
        activation_offload_fraction=1.0,
        delta_offload_bytes_across_pp_ranks=0,
        rematerialize=rematerialize,
    )
    drawn = replace(drawn, config=config)
    return drawn, record(drawn.order, drawn.work, drawn.hardware, config)


def with_host_memory(
    drawn: Drawn, tapes: list[RankTapes], part: float
) -> tuple[Drawn, list[RankTapes]]:
    """The same with so much of what the fullest rank would take on the host."""
    how = drawn.order, tapes, drawn.hardware
    step = predict(*how, peers=drawn.peers, config=drawn.config)
    most = max(rank.host_peak_bytes for rank in step.ranks)
    config = replace(drawn.config, host_budget_bytes=int(part * most))
    return replace(drawn, config=config), tapes


def limits(drawn: Drawn, tapes: list[RankTapes], num: int) -> list[int]:
    """From what is needed where all leaves to what is needed where nothing does."""
    how = drawn.order, tapes, drawn.hardware
    none = predict(*how, peers=drawn.peers, num_steps=1)
    least = predict(*how, peers=drawn.peers, config=drawn.config)
    low, high = (max(rank.peak_bytes for rank in step.ranks) for step in (least, none))
    return [low + (high - low) * part // (num - 1) for part in range(num)]
