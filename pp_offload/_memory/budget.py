"""Budget of host memory of a process: one count for all its managers.

The memory available is the least that the kernel, and every cgroup above the process, would still
give. The default budget is a share of that, divided among the ranks of the host.

    budget = HostBudget(limit_bytes=2**30)
    reserved = budget.reserve(nbytes)  # counted for as long as ``reserved`` lives
"""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

SHARE = 0.8  # of the available memory, which the ranks of a host may take together by default
UNLIMITED = 2**60  # without a limit, cgroup v1 writes a number of at least this size

LOCAL_RANKS = (
    "LOCAL_WORLD_SIZE",  # torchrun
    "SLURM_NTASKS_PER_NODE",  # such as 8 or 8(x2)
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "WORLD_SIZE",
)
"""Variables with the number of ranks on a host; the last only as an upper bound."""

CGROUPS = (
    ("", "sys/fs/cgroup", "max", "current", "inactive_file"),
    ("memory", "sys/fs/cgroup/memory", "limit_in_bytes", "usage_in_bytes", "total_inactive_file"),
)
"""Of v2 and v1: the controller, its folder, files of limit and use behind ``memory.``, and the key
of the page cache in ``memory.stat``.
"""


class OverBudgetError(MemoryError):
    """The bytes would be over the budget, whatever the system has."""


@dataclass(eq=False)
class Reserved:
    """Bytes counted as used for as long as this object lives."""

    nbytes: int


class _Process:
    """Sum of what all budgets of this process reserved. The sum is taken when asked for, so no
    Python code runs where a reservation ends.
    """

    def __init__(self) -> None:
        self.reserved: list[weakref.ref[Reserved]] = []
        self.renew_lock()

    def renew_lock(self) -> None:
        """Make a new lock in a forked process: a thread of its parent may have held the old one."""
        self.lock = threading.RLock()  # managers of several threads share the count

    @property
    def nbytes(self) -> int:
        return sum(live.nbytes for ref in self.reserved if (live := ref()) is not None)


_PROCESS = _Process()
os.register_at_fork(after_in_child=_PROCESS.renew_lock)

_counts: ContextVar[_Process] = ContextVar("_counts", default=_PROCESS)
"""The count of budgets made from now on."""


@contextmanager
def as_another_process() -> Iterator[None]:
    """Budgets made inside share a count of their own, for as long as they live."""
    token = _counts.set(_Process())
    try:
        yield
    finally:
        _counts.reset(token)


class HostBudget:
    """A limit on the bytes that all managers of this process hold together.

    Args:
        limit_bytes: Limit of this process; None for this rank's part of :data:`SHARE` of the memory
            available when the first bytes are reserved.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.process = _counts.get()
        if limit_bytes is not None:
            self.limit_bytes = limit_bytes

    @cached_property
    def limit_bytes(self) -> int:
        """The most that may be reserved in this process."""
        return self.process.nbytes + int(available_bytes() * SHARE) // ranks_on_this_host()

    def but_for(self, share: int) -> HostBudget:
        """Return this budget less one part in ``share`` of its limit, in the same count."""
        rest = HostBudget(self.limit_bytes - self.limit_bytes // share)
        rest.process = self.process
        return rest

    @property
    def left_bytes(self) -> int:
        """Bytes that may still be reserved; never negative."""
        return max(0, self.limit_bytes - self.process.nbytes)

    def reserve(self, nbytes: int, *, force: bool = False) -> Reserved:
        """Count ``nbytes`` as used for as long as the result lives. Raises an OverBudgetError if
        that is over the limit; if forced, they are counted all the same.
        """
        process = self.process
        with process.lock:
            if nbytes > self.left_bytes and not force:
                raise OverBudgetError(
                    f"{nbytes} more bytes of host memory would be over the budget of this process: "
                    f"{self.left_bytes} of {self.limit_bytes} bytes are left; raise "
                    "host_budget_bytes"
                )
            reserved = Reserved(nbytes)
            live = [ref for ref in process.reserved if ref() is not None]
            process.reserved = [*live, weakref.ref(reserved)]
            return reserved


def reserved_bytes() -> int:
    """Return the bytes that this process has reserved, by all budgets together."""
    return _PROCESS.nbytes


def ranks_on_this_host() -> int:
    """Return how many processes share this host, by the launcher's variables; 1 without them."""
    for name in LOCAL_RANKS:
        number = re.match(r"\d+", os.environ.get(name, ""))
        if number:
            return max(1, int(number[0]))
    return 1


def available_bytes(root: Path = Path("/")) -> int:
    """Return bytes that the kernel and the process's cgroups would still give, by the files below
    ``root``; the physical memory if nothing else can be read, as on a system without ``/proc``.
    """
    available = [each.limit_bytes - each.used_bytes + each.cached_bytes for each in cgroups(root)]
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            available.append(int(line.split()[1]) * 1024)
    if not available:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min(available))


class Cgroup(NamedTuple):
    """A cgroup with a limit of memory."""

    version: int
    limit_bytes: int
    used_bytes: int
    cached_bytes: int  # of those used: the page cache, which is given up on demand


def cgroups(root: Path) -> Iterator[Cgroup]:
    """Yield the cgroups of this process that have a limit, and those above them."""
    members: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            members.setdefault(controller, path.strip("/"))
    for controller, folder, *files, cache in CGROUPS:
        base = root / folder
        member = base / members.get(controller, "")
        for directory in (member, *member.parents):
            limit, used = [_number(directory / f"memory.{name}") for name in files]
            if limit is not None and used is not None and limit < UNLIMITED:
                lines = _lines(directory / "memory.stat")
                stat = dict(line.split(" ", 1) for line in lines if " " in line)
                yield Cgroup(1 if controller else 2, limit, used, int(stat.get(cache, 0)))
            if directory == base:
                break


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
