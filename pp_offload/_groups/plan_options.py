"""Options that a plan was made with, and why groups of a run are not as planned.

    plan.options == options_of(config, num_microbatches=16, schedule="Schedule1F1B")

Options with default values are omitted. The plan of an older file has no options.
"""

from __future__ import annotations

from typing import Any

from pp_offload.config import OffloadConfig

OPTIONS = (
    *("tiers", "host_budget_bytes", "max_in_flight_bytes", "prefetch_bytes", "split_backward"),
    "min_offloaded_tensor_size",
)
"""Options of :class:`OffloadConfig` that change how an engine follows a plan."""

OTHERS_ON_A_CPU = (
    "on a CPU some operators save other bytes than on the GPU of a plan, as dropout does"
)
"""Text for messages about unplanned bytes. Dropout saves a mask of bool on a GPU only."""


def options_of(config: OffloadConfig, *, num_microbatches: int, schedule: str) -> dict[str, Any]:
    """Return the options that a plan was made with, as JSON values."""
    defaults = _plain(OffloadConfig())
    given = {name: value for name, value in _plain(config).items() if value != defaults[name]}
    return given | {"num_microbatches": num_microbatches, "schedule": schedule}


def _plain(config: OffloadConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in OPTIONS} | {"tiers": list(config.tiers)}


def why_unplanned(config: OffloadConfig, smallest_numel: int | None) -> str:
    """Return why a run's groups differ from its plan, and what to do, for the end of a message."""
    name, plan = "min_offloaded_tensor_size", config.offload_plan
    here = getattr(config, name) if smallest_numel is None else smallest_numel
    planned = here
    if plan is not None and plan.options:  # the plan of an older file has none
        planned = plan.options.get(name, getattr(OffloadConfig(), name))
    if planned != here:
        return (
            f"{name} was {planned} for the plan, and is {here} here; give the same, or plan again"
        )
    return f"make a plan for this model, length and {name}; {OTHERS_ON_A_CPU}"
