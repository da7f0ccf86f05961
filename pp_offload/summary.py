"""The table over all ranks: what each offloaded, by group.

    print_offload_summary_table(manager.offload_summary_bytes)

It gathers, so every rank of the process group must call it, those without groups as well; nothing
else in this package communicates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from pp_offload._common.checks import check_kind
from pp_offload._megatron.manager import PipelineOffloadManager

MIB = 2**20

NOTHING_YET = (
    "nothing was offloaded in a complete step: a step counts from the next reset() or "
    "schedule.step() on"
)


def summary_table(process_group: dist.ProcessGroup | None = None) -> str:
    """What every rank of the group offloaded in its last complete step, as text.

    Collective: every rank of ``process_group`` calls it. A rank without groups, or without a
    complete step, counts as zero.

    Args:
        process_group: The default group when None. Without ``torch.distributed``, one rank.

    Returns:
        A table with a row per rank and a column per group, in MiB; the same on every rank. A step
        is complete when backward reached every group, and counts from the next ``reset()`` or
        ``schedule.step()`` on; before, the table says so.
    """
    mine = PipelineOffloadManager.get_instance().offload_summary_bytes
    return format_summary(_gather(mine, process_group))


def print_offload_summary_table(total_offload_bytes: dict[str, int]) -> None:
    """Gather ``total_offload_bytes`` of all ranks and print the table on rank 0. Collective.

    Args:
        total_offload_bytes: Bytes by group name on this rank; may be empty.
    """
    check_kind("total_offload_bytes", total_offload_bytes, Mapping, "bytes by group name")
    rows = _gather(total_offload_bytes, None)
    if _rank(None) == 0:
        print(format_summary(rows), flush=True)


def format_summary(rows: Sequence[Mapping[str, int]]) -> str:
    """A table of bytes by rank and group, with sums.

    Args:
        rows: Bytes by group name, one mapping per rank.
    """
    names = sorted({name for row in rows for name in row})
    lines = [["rank", *names, "total MiB"]]
    for rank, row in enumerate(rows):
        lines.append([str(rank), *(_mib(row.get(n, 0)) for n in names), _mib(sum(row.values()))])
    sums = [sum(row.get(n, 0) for row in rows) for n in names]
    lines.append(["sum", *map(_mib, sums), _mib(sum(sums))])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
    rule = "-" * len(text[0])
    title = "activations offloaded to the host, by pipeline rank and group"
    note = [] if any(sums) else [NOTHING_YET]
    return "\n".join([title, rule, text[0], rule, *text[1:-1], rule, text[-1], *note])


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.2f}"


def _gather(
    mine: Mapping[str, int], process_group: dist.ProcessGroup | None
) -> list[Mapping[str, int]]:
    if not (dist.is_available() and dist.is_initialized()):
        return [dict(mine)]
    rows: list[Mapping[str, int]] = [{} for _ in range(dist.get_world_size(process_group))]
    dist.all_gather_object(rows, dict(mine), group=process_group)
    return rows


def _rank(process_group: dist.ProcessGroup | None) -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(process_group)
    return 0
