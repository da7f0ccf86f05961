"""Whether a step of a trace is one of the model, schedule and length that a plan is for.

    seen = groups_in(spans, window)
    strangers_of(rank_plan, plan.options, seen)   # what is not as in the plan; empty if all is

NOTE [ What tells of another model ]
    A forward of a group says its name, its place, its microbatch, and the bytes that it copied.
    Names, places and microbatches are those of the model and the schedule, whatever leaves. A group
    copies fewer bytes than it has where another one has copied some of them, so fewer bytes tell of
    another length only where all groups have fewer, and so does the whole step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pp_offload._common.offload_plan import PlannedGroup, RankPlan
from pp_offload._core.keys import Place
from pp_offload._groups.plan_options import OTHERS_ON_A_CPU
from pp_offload.trace.events import Span
from pp_offload.trace.intervals import Interval
from pp_offload.trace.kinds import Kind, kind_of

TOLERANCE = 0.02
"""What differs by less is as planned."""


@dataclass(frozen=True)
class GroupsSeen:
    """The groups of one rank in one step."""

    names: Mapping[Place, str]
    num_microbatches: int
    copied_bytes: Mapping[Place, int]
    """The most that a group of this place has copied; 0 where it stayed in all microbatches."""

    @property
    def num_stages(self) -> int:
        """Of the rank, as far as they have groups."""
        return 1 + max((place.vp_stage for place in self.names), default=-1)

    def num_groups(self, vp_stage: int) -> int:
        """Of a microbatch."""
        return 1 + max((at.position for at in self.names if at.vp_stage == vp_stage), default=-1)


def groups_in(spans: Sequence[Span], window: Interval) -> GroupsSeen:
    """Those whose forward began in the window.

    Args:
        spans: Of one rank.
        window: A step.
    """
    names: dict[Place, str] = {}
    microbatches: set[int] = set()
    copied: Counter[Place] = Counter()
    for span in spans:
        is_inside = window[0] <= span.begin_s < window[1]
        if is_inside and "position" in span.args and kind_of(span) is Kind.FORWARD:
            place = Place(span.args["vp_stage"], span.args["position"])
            names[place] = span.name.removesuffix(" (forward)")
            microbatches.add(span.args["microbatch"])
            copied[place] = max(copied[place], span.args.get("bytes", 0))
    return GroupsSeen(names, len(microbatches), copied)


def strangers_of(
    planned: RankPlan, options: Mapping[str, Any], seen: GroupsSeen, offloaded_bytes: int
) -> tuple[str, ...]:
    """What says that a plan is for something else than what ran. See NOTE [ What tells of another
    model ].

    Args:
        planned: Of the rank.
        options: Of the plan.
        seen: In the step.
        offloaded_bytes: In the step.
    """
    num = seen.num_stages
    if num > len(planned.stages):
        return (
            f"the plan is of another schedule: the rank has {num} stages, planned "
            f"{len(planned.stages)}",
        )
    found = [*_other_groups(planned, seen), *_other_microbatches(options, seen)]
    if not found and _differ(planned.bytes_offloaded, offloaded_bytes):
        found = [*_other_bytes(planned, seen)]
    return tuple(found)


def _other_groups(planned: RankPlan, seen: GroupsSeen) -> Iterator[str]:
    """Of the first stage that has others."""
    for vp_stage, groups in enumerate(planned.stages):
        num, expected = seen.num_groups(vp_stage), _num_expected(groups)
        if not expected <= num <= len(groups):
            yield (
                f"the plan is of another model: stage {vp_stage} has {num} groups in a microbatch, "
                f"planned {len(groups)}"
            )
            return
        for position, group in enumerate(groups):
            name = seen.names.get(Place(vp_stage, position), group.name)
            if name != group.name:
                yield (
                    f"the plan is of another model: group {position} of stage {vp_stage} is "
                    f"{name!r}, planned {group.name!r}"
                )
                return


def _num_expected(groups: Sequence[PlannedGroup]) -> int:
    """How many there are at least: those at the end that save nothing may have no span."""
    return max((number for number, group in enumerate(groups, 1) if group.nbytes), default=0)


def _other_microbatches(options: Mapping[str, Any], seen: GroupsSeen) -> Iterator[str]:
    planned = options.get("num_microbatches", seen.num_microbatches)
    if seen.names and seen.num_microbatches != planned:
        yield (
            "the plan is of another number of microbatches: a step has "
            f"{seen.num_microbatches}, planned {planned}"
        )


def _other_bytes(planned: RankPlan, seen: GroupsSeen) -> Iterator[str]:
    left = [
        (place, group, seen.copied_bytes[place])
        for place, group in _by_place(planned)
        if seen.copied_bytes.get(place)
    ]
    others = [one for one in left if _differ(one[1].nbytes, one[2])]
    more = [one for one in others if one[2] > one[1].nbytes]
    if more or (others and len(others) == len(left)):
        place, group, nbytes = (more or others)[0]
        yield (
            "the plan is of another length, size of a microbatch or min_offloaded_tensor_size: "
            f"group {place.position} of stage {place.vp_stage}, {group.name!r}, moved "
            f"{_size(nbytes)}, planned {_size(group.nbytes)}; {OTHERS_ON_A_CPU}"
        )


def why_other_bytes(planned: RankPlan, seen: GroupsSeen) -> str:
    """What groups did in a step that sent more than planned, or less; empty if nothing is seen.

    The last groups of a chunk stay at any rate, so only what did so in all microbatches counts.
    """
    groups = [
        (group, bool(seen.copied_bytes[place]))
        for place, group in _by_place(planned)
        if group.nbytes and place in seen.names
    ]
    num_left = sum(left and group.keeps for group, left in groups)
    if num_left:
        return (
            f"{num_left} group{'s' * (num_left > 1)} of a microbatch left and should have stayed; "
            "the engine did not follow the plan"
        )
    num_stayed = sum(not left and not group.keeps for group, left in groups)
    if num_stayed and seen.num_microbatches > 1:
        return (
            f"{num_stayed} group{'s' * (num_stayed > 1)} of a microbatch stayed and should have "
            "left; there was no room for that, or the engine did not follow the plan"
        )
    return ""


def _by_place(planned: RankPlan) -> Iterator[tuple[Place, PlannedGroup]]:
    for vp_stage, groups in enumerate(planned.stages):
        for position, group in enumerate(groups):
            yield Place(vp_stage, position), group


def _differ(planned: float, found: float) -> bool:
    return abs(planned - found) > TOLERANCE * planned


def _size(nbytes: int) -> str:
    """With the unit that makes it short."""
    number, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if number < 1024:
            break
        number, unit = number / 1024, larger
    return f"{number:.0f} B" if unit == "B" else f"{number:.2f} {unit}"
