"""Plan of a run: what each rank keeps, offloads and recomputes; and the plan's file.

    plan = OffloadPlan.load("plan.json")
    plan.ranks[0].stages[0][3].keeps
    plan.save("plan.json")

:mod:`pp_offload.plan` makes plans; the engine follows them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pp_offload._common.checks import brief
from pp_offload.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

FORMAT = "pp_offload plan 1"

HOW = "expected a plan as `pp-offload plan -o` writes it"


@dataclass(frozen=True)
class PlannedGroup:
    """A group of a stage.

    Attributes:
        nbytes: Bytes that an offload of the group moves. A group with other bytes is not planned.
        keeps: True if the group stays on the device.
    """

    name: str
    nbytes: int
    keeps: bool


@dataclass(frozen=True)
class RankPlan:
    """Plan of a rank, and the predicted cost of a step.

    Attributes:
        stages: Groups in forward order, by virtual stage.
        recomputed: Names of layers that backward recomputes whole, by virtual stage; for
            :func:`pp_offload.recompute_layers`. Recomputed layers have no groups.
        peak_bytes: Peak of the device, with parameters, gradients and, where planned, the
            optimizer's state.
        seconds: Time from the begin of the step until the rank's compute has ended.
        busy_s: Part of ``seconds`` in which compute works.
        stalled_s: Part of ``seconds`` in which compute waits for copies.
        bytes_offloaded: Bytes copied to the host.
        offload_s: Time that the copies to the host take.
        on_demand_reloads: Payloads reloaded only when backward reaches their group.
        optimizer_bytes: Part of the peak that is the optimizer's state; 0 without an optimizer.
        max_in_flight_bytes, prefetch_bytes: Options of this rank; None if the engine chooses.
    """

    stages: tuple[tuple[PlannedGroup, ...], ...]
    recomputed: tuple[tuple[str, ...], ...] = ()
    peak_bytes: int = 0
    host_peak_bytes: int = 0
    seconds: float = 0.0
    busy_s: float = 0.0
    stalled_s: float = 0.0
    bytes_offloaded: int = 0
    offload_s: float = 0.0
    on_demand_reloads: int = 0
    optimizer_bytes: int = 0
    max_in_flight_bytes: int | None = None
    prefetch_bytes: int | None = None

    @property
    def bounds(self) -> tuple[int, int] | None:
        """Bounds on bytes in flight and on bytes ahead; None if the engine chooses."""
        if self.max_in_flight_bytes is None or self.prefetch_bytes is None:
            return None
        return self.max_in_flight_bytes, self.prefetch_bytes


@dataclass(frozen=True)
class OffloadPlan:
    """Plan of all ranks of a pipeline.

    Attributes:
        made_for: Model, schedule and device, in words.
        limit_bytes: Limit on the peak of each device.
        seconds: Time of a step by this plan.
        least_seconds: Time of a step without any offload. No plan is faster: offload only adds
            waits.
        options: Options the plan was made with, by name, which the run needs, too: fields of
            :class:`pp_offload.OffloadConfig` that differ from the default, ``num_microbatches``
            and ``schedule``.
    """

    made_for: str
    limit_bytes: int
    seconds: float
    least_seconds: float
    ranks: tuple[RankPlan, ...]
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def rank(self, number: int) -> RankPlan:
        """Return the plan of one rank.

        Raises:
            ConfigError: The plan has fewer ranks.
        """
        if number < len(self.ranks):
            return self.ranks[number]
        raise ConfigError(
            f"the plan is for {len(self.ranks)} pipeline ranks, and here is a rank {number}; "
            "expected a plan for this pipeline: make one with as many ranks"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; :meth:`from_dict` makes an equal plan of them."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Make a plan from the result of :meth:`to_dict`.

        Raises:
            ConfigError: The content is no plan.
        """
        if not isinstance(content, Mapping) or content.get("format") != FORMAT:
            actual = content.get("format") if isinstance(content, Mapping) else content
            raise ConfigError(f"the format is {brief(actual)}, expected {FORMAT!r}; {HOW}")
        values = {name: value for name, value in content.items() if name != "format"}
        try:
            values["ranks"] = tuple(map(_rank, values["ranks"]))
            return cls(**values)
        except (KeyError, TypeError) as failure:
            kind = type(failure).__name__
            raise ConfigError(f"the values do not fit ({kind}: {failure}); {HOW}") from failure

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a plan from a file.

        Raises:
            ConfigError: The file holds no plan.
            OSError: The file cannot be read.
        """
        with open(path, encoding="utf-8") as file:
            try:
                return cls.from_dict(json.load(file))
            except ValueError as failure:  # also of a binary file, such as a trace
                how = "" if isinstance(failure, ConfigError) else f"; {HOW}"
                raise ConfigError(f"{os.fspath(path)} holds no plan: {failure}{how}") from failure

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON.

        Raises:
            OSError: The file cannot be written.
        """
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.to_dict(), file, indent=1)
            file.write("\n")


def _rank(content: Mapping[str, Any]) -> RankPlan:
    stages = tuple(tuple(PlannedGroup(**group) for group in stage) for stage in content["stages"])
    recomputed = tuple(map(tuple, content.get("recomputed", ())))
    return RankPlan(**{**content, "stages": stages, "recomputed": recomputed})
