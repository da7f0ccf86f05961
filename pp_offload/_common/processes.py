"""The current process: its number, rank, log and garbage collector.

Threads, copies in flight and files do not follow a fork. Owners of such resources note
:data:`HERE`, and call :func:`check` before each use.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch.distributed as dist

from pp_offload.errors import ForkedError

HERE = [os.getpid()]
"""Number of this process. A system call for each tensor would take too long."""


def _after_fork() -> None:
    HERE[0] = os.getpid()


os.register_at_fork(after_in_child=_after_fork)


def own_rank(process_group: dist.ProcessGroup | None = None) -> int | None:
    """Return the rank of this process in a group; None without process groups."""
    has_groups = dist.is_available() and dist.is_initialized()
    return dist.get_rank(process_group) if has_groups else None


def logger_of(name: str) -> logging.Logger:
    """Make a logger whose lines begin with the package, and the rank if there is one."""
    logger = logging.getLogger(name)
    logger.addFilter(_name_rank)
    return logger


def _name_rank(record: logging.LogRecord) -> bool:
    rank = own_rank()
    record.msg = f"pp_offload{'' if rank is None else f' [rank {rank}]'}: {record.msg}"
    return True


_warned: WeakKeyDictionary[object, set[str]] = WeakKeyDictionary()
"""Messages of :func:`warn_once`, by owner."""


def warn_once(logger: logging.Logger, owner: object, message: str, *args: object) -> None:
    """Log a warning once for each owner; at level DEBUG when it comes again."""
    messages = _warned.setdefault(owner, set())
    logger.log(logging.DEBUG if message in messages else logging.WARNING, message, *args)
    messages.add(message)


def check(owner: int, what: str) -> None:
    """Raise a ForkedError unless this is process ``owner``, which alone may use ``what``."""
    if owner != HERE[0]:
        raise ForkedError(
            f"{what} belongs to process {owner}, and this is process {HERE[0]}, forked from it: "
            "its copies and its file do not follow; run forward and backward in the same process, "
            "and fork (or start workers) when no graph is needed on the other side"
        )


@contextmanager
def collector_off() -> Iterator[None]:
    """Disable the collector in the block, and restore its state afterwards."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
