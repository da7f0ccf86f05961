"""Table of the bytes that are off the device at the peak of a step, by rank and group.

    print_offload_summary_table(manager.offload_summary_bytes)

The table gathers, so every rank of the process group must call it, also a rank without groups.
Nothing else in this package communicates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from pp_offload._common.processes import logger_of, own_rank
from pp_offload._common.text import format_table, size_cell, size_text
from pp_offload._common.torch_private import default_store
from pp_offload._groups.plan import GroupBytes, groups_sum
from pp_offload._groups.step_line import gain_table
from pp_offload._megatron.manager import PipelineOffloadManager
from pp_offload.errors import OffloadError

logger = logger_of(__name__)

WARN_S = 10  # after which a rank that waits for other ranks in vain logs a warning
PATIENCE_S = 300  # after which a waiting rank gives up, as stores do; another rank may be saving
GIVEN_UP = 10**9
_num_calls: Counter[str] = Counter()  # of tables so far, by the ranks that take part

_mib = partial(size_cell, unit="MiB")

NOTHING_YET = (
    "nothing offloaded: a plan, or a lack of room, keeps all groups, or all tensors are below "
    "min_offloaded_tensor_size, or no step is complete yet (a step counts from the next reset() or "
    "schedule.step(), if each microbatch had its backward), or there are no groups "
    "(print(offload) tells what a context did)"
)


def summary_table(process_group: dist.ProcessGroup | None = None, *, local: bool = False) -> str:
    """Format the bytes that are off the device at the peak of each rank's last complete step.

    Collective: every rank of ``process_group`` must call it. A rank without groups, or without a
    complete step, counts as zero.

    Args:
        process_group: The default group when None. Without ``torch.distributed``, one rank.
        local: Whether to format this rank alone, which is not collective.

    Returns:
        A table in MiB, the same on every rank: a row per rank, a column per group, and what
        backward computes again in place of a copy. With ``local``, a row per group: how many of its
        saved bytes were kept, copied and computed again. A step is complete when each microbatch
        had its backward, and counts from the next ``reset()`` or ``schedule.step()``. Below, a row
        per rank: the time and the peak of a step now, at first, and without offload.
    """
    manager = PipelineOffloadManager.get_instance()
    if local:
        text, gains = format_groups(manager.group_bytes), {"this rank": manager.gain()}
    else:
        again = sum(each.again for each in manager.group_bytes.values())
        own = {"bytes": manager.offload_summary_bytes, "again": again, "gain": manager.gain()}
        rows = _gather(own, process_group)
        text = format_summary([row["bytes"] for row in rows], [row["again"] for row in rows])
        gains = {f"rank {n}": row["gain"] for n, row in enumerate(rows)}
    return f"{text}\n\n{gain_table(gains)}".rstrip()


def format_groups(groups: Mapping[str, GroupBytes]) -> str:
    """Format saved bytes by group, in MiB: kept, copied and computed again, with sums."""
    total = groups_sum(groups.values())
    rows = [(name, *map(_mib, groups[name])) for name in sorted(groups)]
    head = ("group", "saved", "kept", "copied", "computed again", "copied as less")
    text = format_table([head, *rows, ("sum", *map(_mib, total))])
    note = [] if total.copied or total.again else [NOTHING_YET]
    return "\n".join(["what became of the bytes that groups saved, in MiB", text, *note])


def print_offload_summary_table(
    total_offload_bytes: dict[str, int],
    local_duplicate_summary: Mapping[str, tuple[int, int]] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Gather ``total_offload_bytes`` of all ranks and print the table on rank 0. Collective.

    Args:
        total_offload_bytes: Bytes by group name on this rank; may be empty.
        local_duplicate_summary: Number and bytes of repeated copies of the same bytes, by group
            name on this rank; a line each, below the table. The engine itself copies bytes once.
        process_group: The default group when None; its rank 0 prints.
    """
    own = {"bytes": dict(total_offload_bytes), "more": dict(local_duplicate_summary or {})}
    rows = _gather(own, process_group)
    if own_rank(process_group) in (None, 0):
        lines = [
            f"rank {rank}, {name}: {num} copies of what was copied before, {size_text(nbytes)}"
            for rank, row in enumerate(rows)
            for name, (num, nbytes) in sorted(row["more"].items())
        ]
        print("\n".join([format_summary([row["bytes"] for row in rows]), *lines]), flush=True)


def format_summary(rows: Sequence[Mapping[str, int]], again: Sequence[int] | None = None) -> str:
    """Format each rank's bytes by group name, with sums; and, if given, what it computes again."""
    names = sorted({name for row in rows for name in row})
    sums = {name: sum(row.get(name, 0) for row in rows) for name in names}
    lines = [["rank", *names, "total MiB"]]
    for label, row in (*enumerate(rows), ("sum", sums)):
        lines.append([str(label), *(_mib(row.get(n, 0)) for n in names), _mib(sum(row.values()))])
    if again is not None:
        column = ["computed again", *map(_mib, again), _mib(sum(again))]
        lines = [[*line, cell] for line, cell in zip(lines, column, strict=True)]
    title = "offloaded at the peak of a step, by pipeline rank and group"
    note = [] if any(sums.values()) or any(again or ()) else [NOTHING_YET]
    return "\n".join([title, format_table(lines), *note])


def _gather(row: dict[str, Any], group: dist.ProcessGroup | None) -> list[dict[str, Any]]:
    if own_rank() is None:
        return [row]
    _wait_for_all(dist.get_process_group_ranks(group))
    rows: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(rows, row, group=group)
    return rows


def _wait_for_all(ranks: Sequence[int]) -> None:
    """Wait until every rank is about to gather; without one of them a collective would hang. Ranks
    count themselves in the store of the process group, with a number for each call. A rank that
    gives up, after :data:`PATIENCE_S` with an OffloadError, takes :data:`GIVEN_UP` off the count,
    so that later ranks do not wait.
    """
    store, name = default_store(), f"{ranks[0]}-{len(ranks)}-{hash(tuple(ranks))}"
    _num_calls[name] += 1
    key = f"pp_offload/summary/{name}/{_num_calls[name]}"
    store.set(f"{key}/{dist.get_rank()}", "")
    num_here = store.add(key, 1)
    if num_here == len(ranks):
        store.set(f"{key}/all", "")
        return
    for wait_s in (WARN_S, PATIENCE_S - WARN_S) if num_here > 0 else ():
        with suppress(RuntimeError):  # the wait is over, and the key is not set
            store.wait([f"{key}/all"], timedelta(seconds=wait_s))
            return
        if wait_s == WARN_S:
            missing = [rank for rank in ranks if not store.check([f"{key}/{rank}"])]
            logger.warning("the summary of all ranks waits for ranks %s", missing)
    if num_here <= 0 or store.add(key, -GIVEN_UP) + GIVEN_UP != len(ranks):
        missing = [rank for rank in ranks if not store.check([f"{key}/{rank}"])]
        cause = f"ranks {missing} did not ask for it within {PATIENCE_S} s"
        if not missing:
            cause = "another rank has given up waiting for this one"
        raise OffloadError(
            f"the table was asked for on rank {dist.get_rank()}, and {cause}; expected a call of "
            "summary_table() on each rank of the process group; call it outside of "
            "'if rank == 0', or summary_table(local=True), which needs no other rank"
        )
