"""A profile as text: tables of kinds of groups, stages and optimizers.

print(profile_table(profile(tapes, hardware)))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pp_offload._common.sizes import size_cell
from pp_offload._common.tables import format_table
from pp_offload.plan.profile import GroupProfile, Profile, StageProfile
from pp_offload.plan.record import neighbours

MIB, GIB = 2**20, 2**30

GROUPS = ("group", "stages", "num", "MiB", "forward ms", "backward ms", "copy ms", "MiB/ms", "")
STAGES = (
    *("stage", "rank", "holds GiB", "saves GiB", "forward peak", "backward peak"),
    *("forward ms", "backward ms", "recompute ms", "frees GiB"),
)

OPTIMIZERS = ("rank", "optimizer's state GiB", "peak", "ms")

NOTE = """\
Of one microbatch, a row for all groups that are alike. MiB/ms: what a group may send for each
millisecond of its forward. The link carries {link:.1f}: a group below that leaves in less time than
its forward takes."""

STAGES_NOTE = """\
holds: parameters and buffers of messages, at the begin of a step. saves: what a microbatch holds
from its forward to its backward if nothing leaves. peaks: the most that the device holds more while
it runs, the backward's with the gradients that it makes. recompute: of each layer that backward
computes anew, and how much less a microbatch holds for it."""

OPTIMIZERS_NOTE = """\
Of the end of each step; the state is there from that of the first one on."""


def profile_table(profile: Profile) -> str:
    """Format a row for each kind of group, for each stage, and for each optimizer."""
    alike: dict[GroupProfile, list[GroupProfile]] = {}
    for group in profile.groups:
        alike.setdefault(_kind(group), []).append(group)
    text = [
        format_table([GROUPS, *map(_group, alike.values())]),
        NOTE.format(link=profile.link_bytes_per_ms / MIB),
        "",
        format_table([STAGES, *(_stage(each, profile.resident_bytes) for each in profile.stages)]),
        STAGES_NOTE,
    ]
    optimizers = [
        (str(rank), _gib(each.resident_bytes), _gib(each.transient_peak_bytes), f"{each.ms:.2f}")
        for rank, each in enumerate(profile.optimizers)
        if each is not None
    ]
    if optimizers:
        text += ["", format_table([OPTIMIZERS, *optimizers]), OPTIMIZERS_NOTE]
    return "\n".join(text)


def _kind(group: GroupProfile) -> GroupProfile:
    """Return the group without its place, and with times in whole nanoseconds: times of equal
    operators differ by the rounding of the clock.
    """
    forward_ms, backward_ms = round(group.forward_ms, 6), round(group.backward_ms, 6)
    return replace(group, layer=0, stage=0, forward_ms=forward_ms, backward_ms=backward_ms)


def _group(groups: Sequence[GroupProfile]) -> tuple[str, ...]:
    """Make the row of groups that are alike."""
    group, runs = groups[0], neighbours(sorted({each.stage for each in groups}))
    stages = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return (
        group.name,
        ", ".join(stages),
        str(len(groups)),
        size_cell(group.nbytes, "MiB", 1),
        f"{group.forward_ms:.2f}",
        f"{group.backward_ms:.2f}",
        f"{group.copy_ms:.2f}",
        f"{group.bytes_per_ms / MIB:.1f}",
        f"shares with {', '.join(group.shared_with)}" if group.shared_with else "",
    )


def _stage(stage: StageProfile, resident_bytes: Sequence[int]) -> tuple[str, ...]:
    return (
        str(stage.stage),
        str(stage.rank),
        _gib(resident_bytes[stage.rank]),
        _gib(stage.forward.resident_bytes),
        _gib(stage.forward.transient_peak_bytes),
        _gib(stage.first_backward.transient_peak_bytes),
        f"{stage.forward.ms:.2f}",
        f"{stage.backward.ms:.2f}",
        "-" if stage.recompute_ms is None else f"{stage.recompute_ms:.2f}",
        "-" if stage.recompute_frees_bytes is None else _gib(stage.recompute_frees_bytes),
    )


def _gib(nbytes: float) -> str:
    return size_cell(int(nbytes))
