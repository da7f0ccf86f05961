"""A profile as text: tables of kinds of groups, stages and optimizers.

print(profile_table(profile(tapes, hardware)))
"""

from __future__ import annotations

from collections.abc import Sequence

from pp_offload._common.tables import format_table
from pp_offload.plan.profile import GroupKind, Profile, StageProfile

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


def profile_table(found: Profile) -> str:
    """Format a row for each kind of group, for each stage, and for each optimizer."""
    kinds = [_group(kind) for kind in found.kinds()]
    stages = [_stage(stage, found.resident_bytes[stage.rank]) for stage in found.stages]
    return "\n".join(
        [
            format_table([GROUPS, *kinds]),
            NOTE.format(link=found.link_bytes_per_ms / MIB),
            "",
            format_table([STAGES, *stages]),
            STAGES_NOTE,
            *_optimizers(found),
        ]
    )


def _optimizers(profile: Profile) -> list[str]:
    rows = [
        (
            str(rank),
            f"{optimizer.resident_bytes / GIB:.2f}",
            f"{optimizer.transient_peak_bytes / GIB:.2f}",
            f"{optimizer.ms:.2f}",
        )
        for rank, optimizer in enumerate(profile.optimizers)
        if optimizer is not None
    ]
    return ["", format_table([OPTIMIZERS, *rows]), OPTIMIZERS_NOTE] if rows else []


def _group(kind: GroupKind) -> tuple[str, ...]:
    group = kind.first
    return (
        group.name,
        _numbers(kind.stages),
        str(kind.num),
        f"{group.nbytes / MIB:.1f}",
        f"{group.forward_ms:.2f}",
        f"{group.backward_ms:.2f}",
        f"{group.copy_ms:.2f}",
        f"{group.bytes_per_ms / MIB:.1f}",
        f"shares with {', '.join(group.shared_with)}" if group.shared_with else "",
    )


def _stage(stage: StageProfile, resident_bytes: int) -> tuple[str, ...]:
    return (
        str(stage.stage),
        str(stage.rank),
        f"{resident_bytes / GIB:.2f}",
        f"{stage.forward.resident_bytes / GIB:.2f}",
        f"{stage.forward.transient_peak_bytes / GIB:.2f}",
        f"{stage.first_backward.transient_peak_bytes / GIB:.2f}",
        f"{stage.forward.ms:.2f}",
        f"{stage.backward.ms:.2f}",
        "-" if stage.recompute_ms is None else f"{stage.recompute_ms:.2f}",
        "-" if stage.recompute_frees_bytes is None else f"{stage.recompute_frees_bytes / GIB:.2f}",
    )


def _numbers(stages: Sequence[int]) -> str:
    """Format ascending numbers; consecutive numbers as a range."""
    runs: list[list[int]] = []
    for stage in stages:
        if runs and stage == runs[-1][-1] + 1:
            runs[-1].append(stage)
        else:
            runs.append([stage])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
