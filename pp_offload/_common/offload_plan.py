"""What each rank keeps, sends away and recomputes, chosen before a run; and the file of it.

    plan = OffloadPlan.load("plan.json")
    plan.ranks[0].stages[0][3].keeps
    plan.save("plan.json")

:mod:`pp_offload.plan` makes them; the engine follows them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from pp_offload._common.checks import said
from pp_offload.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

FORMAT = "pp_offload plan 1"

HOW = "expected a plan as `pp-offload plan -o` writes it"

_T = TypeVar("_T")


@dataclass(frozen=True)
class PlannedGroup:
    """A group of a stage."""

    name: str

    nbytes: int
    """That offloading it moves. A group that has others by then is not the one that was planned."""

    keeps: bool
    """Whether it stays on the device."""

    def is_it(self, name: str, nbytes: int) -> bool:
        """Whether a group at its place is the one that was planned."""
        return (self.name, self.nbytes) == (name, nbytes)


@dataclass(frozen=True)
class RankPlan:
    """What a rank does, and what that is to cost in a step."""

    stages: tuple[tuple[PlannedGroup, ...], ...]
    """Groups in forward order, by virtual stage."""

    recomputed: tuple[tuple[str, ...], ...] = ()
    """Names of layers that backward recomputes whole, by virtual stage; for
    :func:`pp_offload.recompute_layers`. There are no groups in them.
    """

    peak_bytes: int = 0
    """Of its device; parameters and gradients count, and the optimizer's state if one was planned
    with.
    """

    host_peak_bytes: int = 0

    seconds: float = 0.0
    """Until its compute has ended."""

    busy_s: float = 0.0
    """Of that, how long compute works."""

    stalled_s: float = 0.0
    """How long it waits for copies."""

    bytes_offloaded: int = 0
    """Copied to the host."""

    offload_s: float = 0.0
    """How long these copies take."""

    on_demand_reloads: int | None = None
    """Payloads that come only when backward is at their group; None where the file does not say."""

    optimizer_bytes: int = 0
    """Of the peak, the state of the optimizer; 0 where none was planned with, or it has none."""

    max_in_flight_bytes: int | None = None
    """The option of this name, for this rank; None where the engine is to choose."""

    prefetch_bytes: int | None = None
    """As ``max_in_flight_bytes``."""

    @property
    def bounds(self) -> tuple[int, int] | None:
        """On bytes in flight, and on what is ahead; None where the engine is to choose."""
        if self.max_in_flight_bytes is None or self.prefetch_bytes is None:
            return None
        return self.max_in_flight_bytes, self.prefetch_bytes

    def recomputed_in(self, vp_stage: int) -> tuple[str, ...]:
        """Names of the layers that one virtual stage recomputes."""
        return self.recomputed[vp_stage] if vp_stage < len(self.recomputed) else ()


@dataclass(frozen=True)
class OffloadPlan:
    """What all ranks of a pipeline do."""

    made_for: str
    """Model, schedule and device, in words."""

    limit_bytes: int
    """No device's peak is above this."""

    seconds: float
    """Of a step, by this plan."""

    least_seconds: float
    """Of a step without any offload. No plan is faster: offload makes compute wait at times, and
    never makes it wait less.
    """

    ranks: tuple[RankPlan, ...]

    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What it was made with, by name, and a run by it should have: options of
    :class:`pp_offload.OffloadConfig` that are not the default, ``num_microbatches`` and
    ``schedule``. Empty where the file does not say.
    """

    def rank(self, number: int) -> RankPlan:
        """What one rank does.

        Raises:
            ConfigError: The plan has fewer ranks.
        """
        if number < len(self.ranks):
            return self.ranks[number]
        raise ConfigError(
            f"the plan is for {len(self.ranks)} pipeline ranks, and this is rank {number}; expected"
            " a plan for this pipeline: make one with as many ranks"
        )

    def with_limit(self, limit_bytes: int) -> Self:
        """The same for a larger limit."""
        return replace(self, limit_bytes=limit_bytes)

    def recomputed_by_stage(
        self, stages_of: Callable[[int], Sequence[int]]
    ) -> dict[int, tuple[str, ...]]:
        """Names of the layers that are recomputed, by stage of the pipeline.

        Args:
            stages_of: Numbers of the stages of a rank, in the order of its virtual stages.
        """
        return {
            stage: rank.recomputed_in(vp_stage)
            for number, rank in enumerate(self.ranks)
            for vp_stage, stage in enumerate(stages_of(number))
        }

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it; :meth:`from_dict` makes an equal one of it."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Self:
        """What :meth:`to_dict` has given.

        Raises:
            ConfigError: It is something else.
        """
        if not isinstance(found, Mapping) or found.get("format") != FORMAT:
            known = found.get("format") if isinstance(found, Mapping) else found
            raise ConfigError(f"the format is {said(known)}, expected {FORMAT!r}; {HOW}")
        return cls(
            made_for=_value(found, "made_for", str),
            limit_bytes=_count(found, "limit_bytes"),
            seconds=_seconds(found, "seconds"),
            least_seconds=_seconds(found, "least_seconds"),
            ranks=_each(_list(found, "ranks"), _rank_plan),
            options=_value(found, "options", Mapping) if "options" in found else {},
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Of a file.

        Raises:
            ConfigError: It holds no plan.
            OSError: It cannot be read.
        """
        with open(path, encoding="utf-8") as file:
            try:
                return cls.from_dict(json.load(file))
            except UnicodeDecodeError as failure:  # such as a trace, which is compressed
                raise ConfigError(
                    f"{os.fspath(path)} holds no plan, for it is no text; {HOW}"
                ) from failure
            except (ValueError, RecursionError) as failure:
                raise ConfigError(f"{os.fspath(path)} holds no plan: {failure}") from failure

    def save(self, path: str | os.PathLike[str]) -> None:
        """As JSON.

        Raises:
            OSError: It cannot be written.
        """
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.to_dict(), file, indent=1)
            file.write("\n")


def _rank_plan(found: Any) -> RankPlan:
    return RankPlan(
        stages=_each(_list(found, "stages"), lambda stage: _each(stage, _planned_group)),
        recomputed=_each(_list(found, "recomputed"), lambda stage: _each(stage, _name)),
        peak_bytes=_count(found, "peak_bytes"),
        optimizer_bytes=_count_if_told(found, "optimizer_bytes") or 0,
        max_in_flight_bytes=_count_if_told(found, "max_in_flight_bytes"),
        prefetch_bytes=_count_if_told(found, "prefetch_bytes"),
        host_peak_bytes=_count(found, "host_peak_bytes"),
        seconds=_seconds(found, "seconds"),
        busy_s=_seconds(found, "busy_s"),
        stalled_s=_seconds(found, "stalled_s"),
        bytes_offloaded=_count(found, "bytes_offloaded"),
        offload_s=_seconds(found, "offload_s"),
        on_demand_reloads=_count_if_told(found, "on_demand_reloads"),
    )


def _planned_group(found: Any) -> PlannedGroup:
    return PlannedGroup(
        name=_value(found, "name", str),
        nbytes=_count(found, "nbytes"),
        keeps=_value(found, "keeps", bool),
    )


def _name(found: Any) -> str:
    if not isinstance(found, str):
        raise ConfigError(f"found {said(found)} in place of the name of a layer; {HOW}")
    return found


def _each(found: Any, made_of: Callable[[Any], _T]) -> tuple[_T, ...]:
    if not isinstance(found, Sequence) or isinstance(found, str):
        raise ConfigError(f"found {said(found)} in place of a list; {HOW}")
    return tuple([made_of(one) for one in found])


def _list(found: Any, name: str) -> Any:
    return _value(found, name, (list, tuple))


def _count(found: Any, name: str) -> int:
    number: int = _value(found, name, int)
    if number < 0:
        raise ConfigError(f"{name} is {number}, expected an integer of at least 0; {HOW}")
    return number


def _count_if_told(found: Any, name: str) -> int | None:
    """None where the file is older than what it counts."""
    return None if found.get(name) is None else _count(found, name)


def _seconds(found: Any, name: str) -> float:
    seconds = float(_value(found, name, (int, float)))
    if not 0 <= seconds < inf:
        raise ConfigError(f"{name} is {seconds}, expected seconds of at least 0; {HOW}")
    return seconds


def _value(found: Any, name: str, kind: type | tuple[type, ...]) -> Any:
    if not isinstance(found, Mapping) or name not in found:
        raise ConfigError(f"{name} is missing in {said(found)}; {HOW}")
    value = found[name]
    is_kind = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if not is_kind:
        raise ConfigError(f"{name} is {said(value)}, which cannot be; {HOW}")
    return value
