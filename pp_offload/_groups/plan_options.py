"""Options that a plan was made with, and one warning if a run that follows it has others.

    plan.options == options_of(config, num_microbatches=16, schedule="Schedule1F1B")
    check = PlanCheck()                      # each manager has its own
    check.check(config, pipeline_rank)       # logs what differs, at the first call

Options with default values are omitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pp_offload._common.offload_plan import OffloadPlan, RankPlan
from pp_offload._common.processes import logger_of
from pp_offload.config import OffloadConfig

logger = logger_of(__name__)

BOUNDS = ("max_in_flight_bytes", "prefetch_bytes")
OPTIONS = ("tiers", "host_budget_bytes", *BOUNDS, "split_backward", "min_offloaded_tensor_size")
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


class PlanCheck:
    """Compares the options of a run with those of its plan, once."""

    _is_done = False

    def check(
        self,
        config: OffloadConfig,
        pipeline_rank: int,
        *,
        smallest_numel: int | None = None,
        **schedule: Any,
    ) -> None:
        """Log one warning that names each option that differs. Later calls do nothing.

        Args:
            config: Options of the run; without a plan nothing is compared.
            pipeline_rank: Pipeline rank of this process.
            smallest_numel: ``min_offloaded_tensor_size`` of the chunks, if that is another number.
            schedule: ``num_microbatches``, ``schedule`` and ``num_ranks``, if known.
        """
        plan = config.offload_plan
        if self._is_done or plan is None:
            return
        self._is_done = True
        rank, run = plan.rank(pipeline_rank), _plain(config, smallest_numel) | schedule
        differences = [
            f"{name} {planned!r}, here {run[name]!r}"
            for name, planned in _planned(plan).items()
            if name in run and not _is_as_planned(name, run[name], planned, rank)
        ]
        if differences:
            logger.warning(
                "pipeline rank %d: the plan was made with other options than this run has, so what "
                "it says of memory and times does not hold: with %s; give this run the same, or "
                "plan again with those of this run",
                pipeline_rank,
                "; ".join(differences),
            )


def why_unplanned(config: OffloadConfig, smallest_numel: int | None) -> str:
    """Return why a run's groups differ from its plan, and what to do, for the end of a message."""
    name, plan = "min_offloaded_tensor_size", config.offload_plan
    here = _plain(config, smallest_numel)[name]
    planned = here if plan is None else _planned(plan).get(name, here)
    if planned != here:
        return (
            f"{name} was {planned} for the plan, and is {here} here; give the same, or plan again"
        )
    return f"make a plan for this model, length and {name}; {OTHERS_ON_A_CPU}"


def _plain(config: OffloadConfig, smallest_numel: int | None = None) -> dict[str, Any]:
    """Return the options as JSON values."""
    options = {name: getattr(config, name) for name in OPTIONS} | {"tiers": list(config.tiers)}
    if smallest_numel is not None:
        options["min_offloaded_tensor_size"] = smallest_numel
    return options


def _planned(plan: OffloadPlan) -> Mapping[str, Any]:
    """Return the options of a plan, with defaults, and the number of ranks."""
    return {**_plain(OffloadConfig()), **plan.options, "num_ranks": len(plan.ranks)}


def _is_as_planned(name: str, value: Any, planned: Any, rank: RankPlan) -> bool:
    """Whether a run with this value of an option follows the plan."""
    if value == planned:
        return True
    if name in BOUNDS and rank.bounds is not None:
        return bool(value == getattr(OffloadConfig(), name))  # the engine takes the plan's bounds
    if name == "host_budget_bytes" and planned is None:
        return bool(value >= rank.host_peak_bytes)  # the plan had unlimited host memory
    return False
