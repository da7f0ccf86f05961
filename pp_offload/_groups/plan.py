"""Plans of the groups that stay on the device: pure functions of the chunks of one step.

A step is described by its chunks in backward order, each with its groups in forward order. No
function here touches a tensor, a stream or a clock. A plan from a file was made with options,
which the run needs, too; :class:`PlanCheck` warns once of those that differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from pp_offload._common.offload_plan import PlannedGroup, RankPlan
from pp_offload._common.processes import logger_of
from pp_offload._core.group import ChunkKey, Counts, Group, GroupKey, Place
from pp_offload.config import OffloadConfig

# Virtual stages, each with the number of its chunks that are between the begin of forward and the
# end of backward at the same time.
ChunksInFlight = tuple[tuple[int, int], ...]

logger = logger_of(__name__)


class ChunkShape(NamedTuple):
    """A chunk as numbers, with its groups in forward order. Columns, because they compare fast."""

    key: ChunkKey
    names: tuple[str, ...]
    sizes: tuple[int, ...]  # bytes that offloading each group moves

    @classmethod
    def of(cls, key: ChunkKey, groups: Sequence[Group]) -> ChunkShape:
        names, sizes = [g.name for g in groups], [g.counts.nbytes for g in groups]
        return cls(key, tuple(names), tuple(sizes))

    def by_key(self) -> Iterator[tuple[GroupKey, str, int]]:
        for position, (name, nbytes) in enumerate(zip(self.names, self.sizes, strict=True)):
            yield GroupKey(self.key, position), name, nbytes


class GroupBytes(NamedTuple):
    """Bytes that groups saved, without tensors that never leave, by what became of them."""

    saved: int = 0  # by autograd, each storage once in a group
    staying: int = 0  # on the device
    copied: int = 0  # off the device; what several groups saved, once
    again: int = 0  # computed again in backward
    # Part of the copied or staying bytes: tensors in place of saved tensors that were made of them
    # without a loss. The bfloat16 source of a cast has half the bytes.
    narrowed: int = 0

    @classmethod
    def of(cls, counts: Counts, *, stays: bool) -> GroupBytes:
        saved = counts.nbytes - counts.narrowed_bytes + counts.recipe_bytes
        if stays and not counts.again_bytes:
            return cls(saved, staying=saved)
        narrowed = counts.narrowed_bytes if stays or counts.copied_bytes else 0
        staying_bytes = counts.nbytes if stays else 0
        return cls(saved, staying_bytes, counts.copied_bytes, counts.again_bytes, narrowed)


def groups_sum(groups: Iterable[GroupBytes]) -> GroupBytes:
    """Return the sum of the bytes of groups."""
    return GroupBytes(*map(sum, zip(*groups, strict=True)))


class ChunkRecord(NamedTuple):
    """Record of a chunk for the end of a step. Counts are by group name."""

    shape: ChunkShape
    group_bytes: dict[str, GroupBytes]
    num_tensors: Counter[str]
    num_committed: Counter[str]


# Places of groups that stay below a limit, each with the most bytes of a group that stays there,
# and whether groups stay there without bytes that recipes compute again.
Stay = frozenset[tuple[Place, int, bool]]


@dataclass(frozen=True)
class Plan:
    """Groups that the next steps keep on the device."""

    staying: frozenset[GroupKey] = frozenset()
    # Names of each chunk's groups in forward order, from the last step; in ``used``, empty for
    # groups that the loss of some step did not need.
    names: dict[ChunkKey, tuple[str, ...]] = field(default_factory=dict)
    used: dict[ChunkKey, tuple[str, ...]] = field(default_factory=dict)
    num_unplanned: int = 0  # places where groups of a microbatch are not as in the options' plan
    stay: Mapping[Place, int] = field(default_factory=dict)  # most bytes that stay, by place
    lean: frozenset[Place] = frozenset()  # whose groups stay without what recipes compute again
    # The plan of the options, by virtual stage, for chunks that no step has run yet.
    planned: tuple[tuple[PlannedGroup, ...], ...] = ()
    # On bytes in flight and ahead, from the plan of the options. None if the engine chooses them:
    # without such a plan, or if a group is not as planned.
    bounds: tuple[int, int] | None = None

    def keeps(self, key: GroupKey, name: str, nbytes: int) -> bool:
        """Whether the plan lists this group, with this name, and keeps it."""
        if key.chunk in self.names:
            return key in self.staying and self.names[key.chunk][key.position] == name
        groups = self._planned_from(key)
        return groups[:1] == (PlannedGroup(name, nbytes, True),)

    def _planned_from(self, key: GroupKey) -> tuple[PlannedGroup, ...]:
        """Return the options' plan for a group and the later groups of its chunk."""
        vp_stage, position = key.place
        return self.planned[vp_stage][position:] if vp_stage < len(self.planned) else ()

    def is_last_of_its_name(self, key: GroupKey, name: str) -> bool:
        """Whether the plan lists this group, as the last of its name that a loss needs."""
        if key.chunk in self.used:
            names = self.used[key.chunk][key.position :]
        else:
            names = tuple(group.name for group in self._planned_from(key))
        return names[:1] == (name,) and name not in names[1:]


@lru_cache(maxsize=8)
def make_plan(
    chunks: tuple[ChunkShape, ...],
    config: OffloadConfig,
    pipeline_rank: int,
    stay: Stay = frozenset(),
    unused: frozenset[Place] = frozenset(),
) -> Plan:
    """Make the plan after a step, from its chunks in backward order; none before the first step.
    Cached, because steps repeat. Places that a loss did not need are ``unused``. Raise a
    ConfigError if the plan of the options has fewer ranks.
    """
    places = {place: nbytes for place, nbytes, _ in stay}
    groups = [group for chunk in chunks for group in chunk.by_key()]
    at_places = {key for key, _, _ in groups if key.place in places}
    rank = None if config.offload_plan is None else config.offload_plan.rank(pipeline_rank)
    planned = planned_groups(rank)
    unplanned = {at.place for at, name, size in groups if (at.place, name, size) not in planned}
    missing = {place for place, _, _ in planned} - {key.place for key, _, _ in groups}
    return Plan(
        staying=groups_to_keep(chunks, config, pipeline_rank, unused) | at_places,
        names={chunk.key: chunk.names for chunk in chunks},
        used={
            chunk.key: tuple(["" if at.place in unused else name for at, name, _ in chunk.by_key()])
            for chunk in chunks
        },
        num_unplanned=len(unplanned | missing) if rank is not None and chunks else 0,
        stay=places,
        lean=frozenset([place for place, _, is_lean in stay if is_lean]),
        planned=() if rank is None else rank.stages,
        bounds=None if rank is None or unplanned else rank.bounds,
    )


def groups_to_keep(
    chunks: Sequence[ChunkShape],
    config: OffloadConfig,
    pipeline_rank: int,
    unused: frozenset[Place] = frozenset(),
) -> frozenset[GroupKey]:
    """Keep the margin, this rank's bytes, then the fraction; or the margin and the options' plan.
    Each rule looks only at groups that earlier rules do not keep. The margin leaves out ``unused``
    places: groups that no loss needs might gather on the device.
    """
    # For each name its last group in the first chunk with this name: backward uses these groups
    # first, so no compute runs before them that could hide their reload.
    margin: dict[str, GroupKey] = {}
    for chunk in chunks:
        here = [each for each in chunk.by_key() if each[0].place not in unused]
        margin = {name: key for key, name, _ in here} | margin
    keys = set(margin.values())
    groups = [group for chunk in chunks for group in chunk.by_key()]
    if config.offload_plan is not None:
        planned = planned_groups(config.offload_plan.rank(pipeline_rank))
        keys |= {key for key, name, size in groups if planned.get((key.place, name, size))}
    # Keep whole groups, chunk by chunk in backward order, until they sum to this rank's bytes.
    share = pipeline_rank * config.delta_offload_bytes_across_pp_ranks
    for key, _, nbytes in groups:
        if share > 0 and key not in keys:
            keys.add(key)
            share -= nbytes
    # Of the n groups of a chunk not kept yet, the last int(n * (1 - fraction)): in floats, as the
    # reference counts them: 0.9 of 10 keeps none, for 10 * (1 - 0.9) is less than 1.
    for chunk in chunks:
        eligible = [key for key, _, _ in chunk.by_key() if key not in keys]
        num_kept = int(len(eligible) * (1 - config.activation_offload_fraction))
        keys.update(eligible[len(eligible) - num_kept :])
    return frozenset(keys)


def planned_groups(rank: RankPlan | None) -> dict[tuple[Place, str, int], bool]:
    """Return whether the options' plan keeps each of its groups, by place, name and bytes."""
    return {
        (Place(vp_stage, position), group.name, group.nbytes): group.keeps
        for vp_stage, groups in enumerate(() if rank is None else rank.stages)
        for position, group in enumerate(groups)
    }


# Options of :class:`OffloadConfig` that change how an engine follows a plan.
BOUNDS = ("max_in_flight_bytes", "prefetch_bytes")
OPTIONS = ("tiers", "host_budget_bytes", *BOUNDS, "split_backward", "min_offloaded_tensor_size")

# Text for messages about unplanned bytes. Dropout saves a mask of bool on a GPU only.
OTHERS_ON_A_CPU = (
    "on a CPU some operators save other bytes than on the GPU of a plan, as dropout does"
)


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
        """Log one warning that names each option that differs, if ``config`` has a plan. Later
        calls do nothing. ``smallest_numel`` is the ``min_offloaded_tensor_size`` of the chunks, if
        that is another number; ``schedule`` are the ``num_microbatches``, ``schedule`` and
        ``num_ranks``, if known.
        """
        plan = config.offload_plan
        if self._is_done or plan is None:
            return
        self._is_done = True
        rank, run = plan.rank(pipeline_rank), _plain(config, smallest_numel) | schedule
        made_with = {**_plain(OffloadConfig()), **plan.options, "num_ranks": len(plan.ranks)}
        differences = [
            f"{name} {planned!r}, here {run[name]!r}"
            for name, planned in made_with.items()
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


def _plain(config: OffloadConfig, smallest_numel: int | None = None) -> dict[str, Any]:
    """Return the options as JSON values."""
    options = {name: getattr(config, name) for name in OPTIONS} | {"tiers": list(config.tiers)}
    if smallest_numel is not None:
        options["min_offloaded_tensor_size"] = smallest_numel
    return options


def _is_as_planned(name: str, value: Any, planned: Any, rank: RankPlan) -> bool:
    """Whether a run with this value of an option follows the plan."""
    if value == planned:
        return True
    if name in BOUNDS and rank.bounds is not None:
        return bool(value == getattr(OffloadConfig(), name))  # the engine takes the plan's bounds
    if name == "host_budget_bytes" and planned is None:
        return bool(value >= rank.host_peak_bytes)  # the plan had unlimited host memory
    return False
