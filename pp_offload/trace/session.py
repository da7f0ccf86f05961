"""Trace of some steps.

    with Trace("out.json.gz", steps=range(2, 4)) as trace:
        train()
    trace.timeline

A step runs from one ``manager.reset()``, which a schedule calls, to the next. After the last step
of the range, and at the latest at the end of the block, recording ends and the file is written.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch.distributed as dist

from pp_offload._common.checks import check_kind
from pp_offload._common.processes import logger_of
from pp_offload._groups.manager import Manager
from pp_offload._megatron.manager import PipelineOffloadManager
from pp_offload.trace.recorder import Recorder
from pp_offload.trace.timeline import Timeline, part_of, write

logger = logger_of(__name__)


class Trace:
    """Recording of steps of the current manager into a file.

    In ``torch.distributed`` with several ranks, each rank writes its own file, named by
    :func:`part_of`, and sends nothing. :func:`merge_ranks` makes one file of them.

    Args:
        path: File to write; compressed if it ends in ``.gz``.
        steps: Steps to record, counted from 0 at the first ``reset()`` in the block. None records
            the whole block.

    The end of the block raises OSError if the file cannot be written; if the block raised, the log
    has it instead.

    Raises:
        TypeError: ``path`` is no path, or ``steps`` no range.
        ValueError: ``steps`` has no steps in a row, or no file can be at the path.

    Attributes:
        timeline: The recording, even if it cannot be written; None while recording.
    """

    def __init__(self, path: str | os.PathLike[str], *, steps: range | None = None) -> None:
        check_kind("path", path, (str, os.PathLike), "a path", 'write "out.json.gz"')
        self.path = Path(path)
        if not self.path.parent.is_dir() or self.path.is_dir():
            raise ValueError(f"path is {path}, expected a file in a folder that is there")
        if steps is not None:
            check_kind("steps", steps, range, "a range", "write range(2, 4)")
            if not steps or steps.step != 1 or steps.start < 0:
                raise ValueError(f"steps is {steps}, expected some steps in a row, from 0 on")
        self.timeline: Timeline | None = None
        self._steps, self._is_written, self._num_ranks = steps, False, 1
        self._managers: Sequence[Manager] = ()
        self._recorders: list[Recorder] = []

    def ranks(self, managers: Sequence[Manager]) -> AbstractContextManager[object]:
        """Record all ranks of a virtual pipeline, whose devices share one clock."""
        self._managers = managers
        return self

    def __enter__(self) -> Trace:
        managers = self._managers or (PipelineOffloadManager.get_instance(),)
        first, self._num_ranks = 0, len(managers)
        if len(managers) == 1 and dist.is_available() and dist.is_initialized():
            first, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self.timeline, self._is_written = None, False
        self._recorders = [
            Recorder(manager, rank, self._steps, self._write)
            for rank, manager in enumerate(managers, first)
        ]
        return self

    def __exit__(self, kind: type | None, *error: object) -> None:
        for recorder in self._recorders:
            recorder.end()
        if not self._is_written:
            self._write(raises=kind is None)

    def _write(self, *, raises: bool = False) -> None:
        """Write the file when all ranks have ended. Training goes on if that fails."""
        parts = [part for each in self._recorders if (part := each.timeline) is not None]
        if len(parts) < len(self._recorders):
            return
        self.timeline = whole = Timeline(parts[0].base_ns)
        for part in parts:
            whole.add(part)
        for facts in whole.metadata.values():
            facts["num_ranks"] = self._num_ranks
        is_part = len(parts) < self._num_ranks
        path = part_of(self.path, whole.ranks[0]) if is_part else self.path
        try:
            write(whole, path)
        except OSError as failure:  # NOTE [ Failures in the log ]
            if raises:
                raise
            logger.error("%s cannot be written: %s", path, str(failure))
            return
        self._is_written = True
        if not whole.spans:
            logger.warning(
                "%s is empty, for nothing ran of the manager that was traced; expected steps of it "
                "inside the block, and reset() at the begin of each",
                path,
            )
        logger.info("%d spans of ranks %s are in %s", len(whole.spans), whole.ranks, path)
