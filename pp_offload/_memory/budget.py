"""How much host memory a process may take: one count for all its managers.

What is really available is the least of what the kernel, and every cgroup above the process, would
still give. The default budget is a share of that, divided among the ranks of the host.

    budget = HostBudget(limit_bytes=2**30)
    reserved = budget.reserve(nbytes)   # counted for as long as somebody refers to it
    if reserved is None:                # stay below it: keep the tensor, or go to the next tier
        ...
"""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

SHARE = 0.8
"""The part of the available memory that the ranks of a host may take together by default."""

LAUNCHERS_SAY = (
    "LOCAL_WORLD_SIZE",  # torchrun
    "SLURM_NTASKS_PER_NODE",  # such as 8 or 8(x2)
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "WORLD_SIZE",
)
"""How many ranks there are on a host; the last only as an upper bound."""

UNLIMITED = 2**60
"""cgroup v1 writes a number of this size where there is no limit."""


RAISE_IT = "raise host_budget_bytes"
"""What always helps when a budget is not enough."""


class Reserved:
    """Bytes counted as used for as long as anybody refers to this object."""

    __slots__ = ("__weakref__", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class _Process:
    """What all budgets of this process reserved together.

    It is summed when asked for, not kept as a count: there is no subtraction that an interrupt
    could leave out, and no Python code runs where a reservation ends.
    """

    def __init__(self) -> None:
        self._reserved: list[weakref.ref[Reserved]] = []
        self._lock = threading.RLock()  # managers of several threads share the count

    @property
    def nbytes(self) -> int:
        """Exact at the call."""
        return sum(one.nbytes for ref in self._reserved if (one := ref()) is not None)

    def reserve(self, nbytes: int, limit: int) -> Reserved | None:
        """None, and nothing counted, if that were over the limit."""
        with self._lock:
            if self.nbytes + nbytes > limit:
                return None
            reserved = Reserved(nbytes)
            live = [ref for ref in self._reserved if ref() is not None]
            self._reserved = [*live, weakref.ref(reserved)]
            return reserved

    def begin_anew(self) -> None:
        """A new lock for a forked process: a thread that is not there may hold the old one."""
        self._lock = threading.RLock()


_PROCESS = _Process()
os.register_at_fork(after_in_child=_PROCESS.begin_anew)

_counts: ContextVar[_Process] = ContextVar("_counts", default=_PROCESS)
"""What a budget that is made now counts in."""


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
        limit_bytes: For this process; None for this rank's part of :data:`SHARE` of what is
            available when the first bytes are reserved.
        advice: What to do when it is not enough, which depends on who draws on it.
    """

    def __init__(self, limit_bytes: int | None = None, advice: str = RAISE_IT) -> None:
        self.advice = advice
        self._limit_bytes = limit_bytes
        self._process = _counts.get()

    @property
    def limit_bytes(self) -> int:
        """The most that may be reserved in this process."""
        if self._limit_bytes is None:
            share = int(available_bytes() * SHARE) // ranks_on_this_host()
            self._limit_bytes = self._process.nbytes + share
        return self._limit_bytes

    def but_for(self, share: int) -> HostBudget:
        """A budget that leaves one part in ``share`` of this one, as it is now, to others."""
        rest = HostBudget(self.limit_bytes - self.limit_bytes // share, self.advice)
        rest._process = self._process
        return rest

    @property
    def left_bytes(self) -> int:
        """What may still be reserved; never negative."""
        return max(0, self.limit_bytes - self._process.nbytes)

    def reserve(self, nbytes: int, *, force: bool = False) -> Reserved | None:
        """Count ``nbytes`` as used; None, and nothing counted, if they are over the limit.

        Args:
            nbytes: Zero or more.
            force: Count them even then.

        Returns:
            An object to keep for as long as the bytes are used.
        """
        return self._process.reserve(nbytes, UNLIMITED if force else self.limit_bytes)


def reserved_bytes() -> int:
    """What this process has reserved, by all budgets together."""
    return _PROCESS.nbytes


def ranks_on_this_host() -> int:
    """Processes that share this host's memory, as the launcher said.

    If it did not, all of ``WORLD_SIZE`` may be here; 1 without that.
    """
    for name in LAUNCHERS_SAY:
        found = re.match(r"\d+", os.environ.get(name, ""))
        if found:
            return max(1, int(found[0]))
    return 1


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes the kernel and the process's cgroups would still give.

    Args:
        root: Where ``proc`` and ``sys`` are.

    Returns:
        The physical memory where nothing else can be read, as on a system without ``/proc``.
    """
    found = [*_kernel(root), *_cgroup_v2(root), *_cgroup_v1(root)]
    if not found:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min(found))


def _kernel(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _cgroup_v2(root: Path) -> Iterator[int]:
    base = root / "sys/fs/cgroup"
    for directory in _with_parents(base, _membership(root, "")):
        limit, used = _number(directory / "memory.max"), _number(directory / "memory.current")
        if limit is not None and used is not None:
            yield limit - used + _reclaimable(directory, "inactive_file")


def _cgroup_v1(root: Path) -> Iterator[int]:
    base = root / "sys/fs/cgroup/memory"
    for directory in _with_parents(base, _membership(root, "memory")):
        limit = _number(directory / "memory.limit_in_bytes")
        used = _number(directory / "memory.usage_in_bytes")
        if limit is not None and used is not None and limit < UNLIMITED:
            yield limit - used + _reclaimable(directory, "total_inactive_file")


def _membership(root: Path, controller: str) -> str:
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path.strip("/")
    return ""


def _with_parents(base: Path, member: str) -> Iterator[Path]:
    directory = base / member
    while True:
        yield directory
        if directory == base:
            return
        directory = directory.parent


def _reclaimable(directory: Path, name: str) -> int:
    """Page cache that counts as used, but is given up on demand."""
    for line in _lines(directory / "memory.stat"):
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
