"""Several traces as one: those of the ranks, and that of ``torch.profiler`` beside them.

    merge_ranks([part_of("out.json.gz", rank) for rank in range(4)], "out.json.gz")
    merge("out.json.gz", ["profiled.json"], "both.json.gz")

All count from a time of the wall clock, so nothing has to be guessed. Ranks on several machines are
as exact as their clocks agree.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from pp_offload.trace.chrome import read, read_json, to_json, write, write_json
from pp_offload.trace.events import Timeline, joined

FOREIGN_PROCESSES = 2**20
"""Added to the numbers of processes that are those of our ranks. No system has so many."""


def merge_ranks(paths: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Timeline:
    """One file of those that the ranks have written. No rank has to be running.

    Args:
        paths: Of each rank of the run.
        out: The file to write; its parts stay.

    Raises:
        FileNotFoundError: One of them is not there.
        ValueError: They are not of all ranks of a run, each once.
    """
    whole = joined(map(read, paths))
    expected = {known.get("num_ranks", 1) for known in whole.metadata.values()}
    if expected != {len(whole.ranks)} or whole.ranks != list(range(len(whole.ranks))):
        raise ValueError(
            f"the traces are of ranks {whole.ranks} of runs of {sorted(expected)} ranks, expected "
            "those of all ranks of one run"
        )
    write(whole, out)
    return whole


def merge(
    ours: str | os.PathLike[str],
    profilers: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
) -> None:
    """One file of a trace and of what ``torch.profiler`` exported, on one axis.

    Args:
        ours: Of a real run; a virtual one has no time in common with anything.
        profilers: Written by ``export_chrome_trace``, gzipped or not: of one rank, or of several.
        out: The file to write.

    Raises:
        ValueError: ``ours`` is virtual, or a file does not say what its times count from.
    """
    timeline = read(ours)
    if timeline.base_ns == 0:
        raise ValueError(f"{ours} is of a virtual run, whose clock is not that of a profiler")
    found = [read_json(path) for path in profilers]
    for path, one in zip(profilers, found, strict=True):
        if "baseTimeNanoseconds" not in one:
            raise ValueError(f"{path} has no baseTimeNanoseconds, expected one of torch.profiler's")
    base_ns = min(timeline.base_ns, *(int(one["baseTimeNanoseconds"]) for one in found))
    whole = to_json(timeline.based_on(base_ns))
    ranks = set(timeline.ranks)
    for number, one in enumerate(found):
        by_us = (int(one["baseTimeNanoseconds"]) - base_ns) / 1e3
        whole["traceEvents"] += [
            _moved(event, by_us, ranks, number) for event in one["traceEvents"]
        ]
    for key, value in found[0].items() if found else ():
        whole.setdefault(key, value)
    write_json(whole, out)


def _moved(event: dict[str, Any], by_us: float, ranks: set[int], number: int) -> dict[str, Any]:
    """An event of a profiler, at the same time; its process is none of our ranks."""
    moved = dict(event)
    if "ts" in moved:
        moved["ts"] = moved["ts"] + by_us
    if moved.get("pid") in ranks:
        moved["pid"] = FOREIGN_PROCESSES * (number + 1) + moved["pid"]
    return moved
