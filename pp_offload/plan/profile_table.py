"""A profile as two tables, which a person reads first: kinds of groups, and stages.

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
    """A row for each kind of group, one for each stage, and one for each optimizer."""
    kinds = [_group(one) for one in found.kinds()]
    stages = [_stage(one, found.resident_bytes[one.rank]) for one in found.stages]
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


def _optimizers(found: Profile) -> list[str]:
    rows = [
        (
            str(rank),
            f"{one.resident_bytes / GIB:.2f}",
            f"{one.transient_peak_bytes / GIB:.2f}",
            f"{one.ms:.2f}",
        )
        for rank, one in enumerate(found.optimizers)
        if one is not None
    ]
    return ["", format_table([OPTIMIZERS, *rows]), OPTIMIZERS_NOTE] if rows else []


def _group(kind: GroupKind) -> tuple[str, ...]:
    one = kind.first
    return (
        one.name,
        _numbers(kind.stages),
        str(kind.num),
        f"{one.nbytes / MIB:.1f}",
        f"{one.forward_ms:.2f}",
        f"{one.backward_ms:.2f}",
        f"{one.copy_ms:.2f}",
        f"{one.bytes_per_ms / MIB:.1f}",
        f"shares with {', '.join(one.shared_with)}" if one.shared_with else "",
    )


def _stage(one: StageProfile, resident_bytes: int) -> tuple[str, ...]:
    return (
        str(one.stage),
        str(one.rank),
        f"{resident_bytes / GIB:.2f}",
        f"{one.forward.resident_bytes / GIB:.2f}",
        f"{one.forward.transient_peak_bytes / GIB:.2f}",
        f"{one.first_backward.transient_peak_bytes / GIB:.2f}",
        f"{one.forward.ms:.2f}",
        f"{one.backward.ms:.2f}",
        "-" if one.recompute_ms is None else f"{one.recompute_ms:.2f}",
        "-" if one.recompute_frees_bytes is None else f"{one.recompute_frees_bytes / GIB:.2f}",
    )


def _numbers(stages: Sequence[int]) -> str:
    """Ascending numbers, the ones in a row as from and to."""
    runs: list[list[int]] = []
    for one in stages:
        if runs and one == runs[-1][-1] + 1:
            runs[-1].append(one)
        else:
            runs.append([one])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
