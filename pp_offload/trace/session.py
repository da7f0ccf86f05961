"""A trace, as a user makes it.

    with Trace("out.json.gz", steps=range(2, 4)) as trace:
        train()
    trace.timeline

A step begins at ``manager.reset()``, which a schedule calls, and ends at the next one. When the
last one of the range is over the file is written, between two steps, and nothing is recorded any
more; at the latest when the block is left, also by an exception.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pp_offload._common.checks import check_count, check_kind
from pp_offload._groups.manager import Manager
from pp_offload._megatron.manager import PipelineOffloadManager
from pp_offload.errors import OffloadError
from pp_offload.trace.chrome import write
from pp_offload.trace.events import Timeline, joined
from pp_offload.trace.parts import part_of
from pp_offload.trace.rank import RankTrace

logger = logging.getLogger(__name__)

MAX_EVENTS = 500_000
"""Some 70 MB of JSON, an eighth of it gzipped."""


class Trace:
    """Records steps of a manager, and writes a file.

    With ``torch.distributed`` initialised and several ranks, each rank writes a file of its own,
    named by :func:`part_of`; nothing is sent. :func:`merge_ranks` makes one of them.

    Args:
        path: Of the file; gzipped if it ends in ``.gz``.
        steps: Which ones, counted from 0 at the first ``reset()`` in the block; None for all, and
            what runs before.
        manager: Whose; that of the process when None.
        max_events: With more, recording stops: a line in the log and the file say so.

    Leaving the block raises OSError if the file cannot be written; what was recorded is in
    ``timeline`` all the same, for :func:`write`. If the block raised, that goes on, and the log has
    it.

    Raises:
        TypeError: ``path`` is no path, ``steps`` no range, or ``max_events`` no integer.
        ValueError: A number is out of range, or the path is a folder, or in one that is not there.

    Attributes:
        timeline: What was recorded; None as long as it goes on.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        steps: range | None = None,
        manager: Manager | None = None,
        max_events: int = MAX_EVENTS,
    ) -> None:
        check_kind("path", path, (str, os.PathLike), "a path", 'write "out.json.gz"')
        self.path = Path(path)
        if not self.path.parent.is_dir() or self.path.is_dir():
            raise ValueError(f"path is {path}, expected a file in a folder that is there")
        if steps is not None:
            check_kind("steps", steps, range, "a range", "write range(2, 4)")
            if not steps or steps.step != 1 or steps.start < 0:
                raise ValueError(f"steps is {steps}, expected some steps in a row, from 0 on")
        check_count("max_events", max_events, least=1)
        self.timeline: Timeline | None = None
        self._steps = steps
        self._manager = manager
        self._max_events = max_events
        self._stack: ExitStack | None = None

    def __enter__(self) -> Trace:
        if self._stack is not None:
            raise OffloadError("this Trace records already; make another one for a file of its own")
        manager = self._manager or PipelineOffloadManager.get_instance()
        rank, num_ranks = _rank_of_process()
        with ExitStack() as stack:
            stack.enter_context(self._following([manager], rank, num_ranks))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.__exit__(*error)

    def ranks(self, managers: Sequence[Manager]) -> AbstractContextManager[None]:
        """A context in which all ranks of a virtual pipeline are recorded, into one file.

        Args:
            managers: One for each rank, in order, whose devices share one time.
        """
        return self._following(managers, 0, len(managers))

    @contextmanager
    def _following(
        self, managers: Sequence[Manager], first_rank: int, num_ranks: int
    ) -> Iterator[None]:
        self.timeline = None
        is_part = len(managers) < num_ranks
        path = part_of(self.path, first_rank) if is_part else self.path
        traces: list[RankTrace] = []

        def write_if_over() -> None:
            found = [one.timeline for one in traces if one.timeline is not None]
            if len(found) == len(traces):
                try:
                    self._write(joined(found), path)
                except OSError as failure:  # it is tried again when the block is left
                    said = str(failure)  # NOTE [ Failures in the log ]
                    logger.error("%s cannot be written now, training goes on: %s", path, said)

        for rank, manager in enumerate(managers, first_rank):
            known = {"num_ranks": num_ranks, "max_events": self._max_events}
            each = self._max_events // len(managers)
            traces.append(RankTrace(manager, rank, self._steps, each, known))
        with ExitStack() as stack:
            stack.push(partial(self._write_at_last, traces, path))
            for one in traces:
                stack.callback(one.end)
                one.begin(write_if_over)
            yield

    def _write_at_last(
        self, traces: Sequence[RankTrace], path: Path, error: type | None, *rest: object
    ) -> None:
        found = [one.timeline for one in traces if one.timeline is not None]
        if self.timeline is not None or len(found) < len(traces):
            return
        self.timeline = joined(found)  # first: it is there even where the file is not
        try:
            self._write(self.timeline, path)
        except OSError as failure:
            if error is None:
                raise
            logger.error("%s cannot be written: %s", path, str(failure))

    def _write(self, timeline: Timeline, path: Path) -> None:
        write(timeline, path)
        self.timeline = timeline
        is_cut = any(known.get("is_truncated") for known in timeline.metadata.values())
        if not timeline.spans and not is_cut:  # of which the log knows already
            logger.warning(
                "%s is empty, for nothing ran of the manager that was traced; expected steps of it "
                "inside the block, and reset() at the begin of each",
                path,
            )
        logger.info("%d spans of ranks %s are in %s", len(timeline.spans), timeline.ranks, path)


def _rank_of_process() -> tuple[int, int]:
    """Which rank this process is, and of how many."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
