"""Which process this is: threads, copies under way and open files do not follow a fork.

An object that has them remembers the process it was made in, and checks it before it uses them.

    owner = current()
    ...
    check(owner, "this saved tensor")   # raises in a process forked since

Which rank it is, for its lines in a log of many, says :func:`rank_said`.
"""

from __future__ import annotations

import os

import torch.distributed as dist

from pp_offload.errors import ForkedError

HERE = [os.getpid()]
"""The number of this process. Asking the system each time would cost a call per tensor."""


def _after_fork() -> None:
    HERE[0] = os.getpid()


os.register_at_fork(after_in_child=_after_fork)


def current() -> int:
    """The number of this process."""
    return HERE[0]


def rank_said() -> str:
    """``"rank 3: "``, for the begin of a line; empty without ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return ""
    return f"rank {dist.get_rank()}: "


def check(owner: int, what: str) -> None:
    """Raise unless this is process ``owner``, the only one that can use ``what``.

    Raises:
        ForkedError: This is another process.
    """
    if owner != HERE[0]:
        raise ForkedError(
            f"{what} belongs to process {owner}, and this is process {HERE[0]}, forked from it: "
            "its copies and its file do not follow; run forward and backward in the same process, "
            "and fork (or start workers) when no graph is needed on the other side"
        )
