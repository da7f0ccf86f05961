"""Flags of Megatron-LM's own offload engine that approximate a plan: ``plan --for megatron``.

Its engine offloads modules by kind, in all layers of all ranks. In each chunk it keeps a share of
the groups, the last ones, and on rank r in addition r times some bytes of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from pp_offload._common.offload_plan import OffloadPlan, PlannedGroup, RankPlan
from pp_offload.cli.arguments import wrong

MODULES = (
    *("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"),
    *("fused_group_mlp", "gdp_qkv"),
)
"""Names that ``--offload-modules`` accepts: ``TransformerConfig.offload_modules`` of main."""

NOTE = """\
Its engine keeps other groups than planned, as many or fewer: leave it room below the limit."""


def megatron_text(plan: OffloadPlan, in_flight: Sequence[int], min_numel: int) -> str:
    """Format the flags of Megatron-LM for a plan, given the microbatches that each rank holds at a
    time, and the elements of the smallest offloaded tensor.

    Raises:
        ArgumentError: An offloaded group has another name.
    """
    leaving = {group.name for rank in plan.ranks for group in _groups(rank) if not group.keeps}
    if strangers := sorted(leaving - set(MODULES)):
        raise wrong(
            "--for",
            f"groups {', '.join(strangers)} leave, expected names of Megatron's modules: "
            f"{', '.join(MODULES)}; name the groups of the model after these",
        )
    if "attn_proj" in leaving:
        leaving.add("core_attn")  # whose output it saves: Megatron refuses it alone
    flags = []
    if leaving:
        share = max(_share(stage, leaving) for rank in plan.ranks for stage in rank.stages)
        flags += [
            "--fine-grained-activation-offloading",
            f"--offload-modules {' '.join(name for name in MODULES if name in leaving)}",
            f"--min-offloaded-tensor-size {min_numel}",
            f"--activation-offload-fraction {share:g}",
            f"--delta-offload-bytes-across-pp-ranks {_delta(plan, in_flight, leaving, share)}",
        ]
    num_recomputed = max(len(names) for rank in plan.ranks for names in (*rank.recomputed, ()))
    if num_recomputed:  # the first layers of each stage: Megatron has a single number for all
        flags.append("--recompute-granularity full --recompute-method block")
        flags.append(f"--recompute-num-layers {num_recomputed}")
    if not flags:
        return "Megatron-LM needs no flags: nothing is offloaded or recomputed."
    note = [NOTE] if leaving else []
    return "\n".join(["Flags of Megatron-LM:", *(f"  {flag}" for flag in flags), *note])


def _groups(rank: RankPlan) -> list[PlannedGroup]:
    return [group for stage in rank.stages for group in stage if group.nbytes]


def _share(stage: Sequence[PlannedGroup], names: set[str]) -> float:
    """Return the offloaded share of a stage's groups, rounded up: Megatron rounds the rest down."""
    keeps = [group.keeps for group in stage if group.name in names and group.nbytes]
    return ceil(1e4 * keeps.count(False) / len(keeps)) / 1e4 if keeps else 0.0


def _delta(plan: OffloadPlan, in_flight: Sequence[int], names: set[str], share: float) -> int:
    """Return the bytes that each rank keeps more than the one before, in addition to the share."""
    deltas = []
    for number, (rank, num) in enumerate(zip(plan.ranks, in_flight, strict=True)):
        groups = [group for group in _groups(rank) if group.name in names]
        stay_bytes = sum(group.nbytes for group in groups if group.keeps)
        by_share = (1 - share) * sum(group.nbytes for group in groups)
        if number:
            spare_bytes = max(0.0, stay_bytes - by_share) * num / len(rank.stages)
            deltas.append(int(spare_bytes / number))
    return min(deltas, default=0)
