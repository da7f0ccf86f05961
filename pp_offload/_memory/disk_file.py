"""Disk space for batches: one unnamed file, ranges dealt out by first fit, threads that copy.

    write = file.write(payloads, after=[offloaded])  # payloads must not change until it has ended
    write.query(), write.failure                     # if it failed, keep the payloads
    read = file.read_into(write, payloads)           # runs after the write
    read.synchronize()                               # raises DiskTierError if it failed
    del write                                        # its range is free; a queued write is skipped

The file has no name, so nothing remains when the process ends, however it ends. Only its user may
open it. A read compares its checksum with that of the write.

The threads are daemons, so an exit waits for no write. A forked process shares the descriptor and
has no threads: there, each method raises ForkedError, and so does waiting for earlier work.
"""

from __future__ import annotations

import os
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pp_offload._common.processes import HERE, check, logger_of
from pp_offload._common.workers import Piece, Workers, inside_torch
from pp_offload._memory.addresses import Ranges, as_array, new_checksum
from pp_offload.backends import Event
from pp_offload.errors import ClosedError, DiskTierError

logger = logger_of(__name__)

ALIGNMENT = 4096  # bytes, of each batch in the file: a page
BLOCK_BYTES = 2**19  # of one system call, then summed while they are in the CPU's cache
NUM_THREADS = 4  # enough that the disk has work while blocks are summed

Step = Callable[[int, memoryview, int], int]
"""Writes or reads at an offset of a file; returns the number of bytes done."""

Listener = Callable[[str, int, float, float], None]
"""Called after each write or read with its kind (``write``, ``read``), bytes, begin and end by
``perf_counter``.
"""


@dataclass(eq=False)
class DiskEvent:
    """End of one write or read: a piece of work whose result is its failure, or None."""

    piece: Any

    def query(self) -> bool:
        return self.piece.done()

    def synchronize(self) -> None:
        """Block until the work has ended. Raise a DiskTierError if a read failed; a failed write
        sets :attr:`DiskWrite.failure`. Raise a ForkedError if another process queued the work.
        """
        failure = self.piece.result()
        if failure is not None:
            raise DiskTierError(str(failure))  # a new error: a traceback keeps graphs alive


@dataclass(eq=False)
class Extent:
    """A range of the file, free when neither a :class:`DiskWrite` nor a thread refers to it."""

    start: int
    nbytes: int
    checksum: int | None = None  # None until the write has ended
    failure: DiskTierError | None = None


@dataclass(eq=False)
class DiskWrite(DiskEvent):
    """Bytes on disk, or on their way there, for as long as this object lives."""

    extent: Extent

    @property
    def failure(self) -> DiskTierError | None:
        """Why the bytes are not on disk after the write has ended; None if they are."""
        return self.extent.failure

    @property
    def event(self) -> DiskEvent:
        """End of the write; unlike the write, it keeps no bytes on disk."""
        return DiskEvent(self.piece)


@dataclass(eq=False)
class OpenFile:
    """A descriptor, closed when neither a :class:`DiskFile` nor a thread refers to it: earlier, a
    thread might write to another file that gets the same number.
    """

    fd: int

    def __del__(self) -> None:
        os.close(self.fd)


class DiskFile:
    """Batches in an unnamed file. The caller holds a lock around each method.

    Args:
        directory: Directory on a file system with room; made if missing. None for the system's
            directory of temporary files. Without a file there, a DiskTierError is raised.
        num_threads: Number of batches written or read at a time.
    """

    # Tests replace these two by a file system that fails.
    _pwrite: Step = staticmethod(os.pwrite)
    _pread: Step = staticmethod(lambda fd, view, offset: os.preadv(fd, [view], offset))

    def __init__(
        self, directory: str | os.PathLike[str] | None = None, num_threads: int = NUM_THREADS
    ) -> None:
        self.directory = Path(directory or tempfile.gettempdir())
        self.listeners: tuple[Listener, ...] = ()  # of work that is queued from then on
        # Bytes queued to be written and read so far, and the most that were in use at once.
        self.written_bytes = self.read_bytes = self.peak_bytes = 0
        self._file: OpenFile | None = OpenFile(unnamed_file(self.directory))
        # The threads close the file: a destructor loses what a signal handler raises.
        self._threads = Workers("disk", num_threads, keep=self._file)
        new_checksum()  # imports now: a fork during an import leaves a child that hangs
        self._owner = HERE[0]
        self._free = Ranges()
        self._end = self._in_use_bytes = 0
        # By id of the weak reference to an extent, its start and bytes; to a write, None and bytes.
        self._live: dict[int, tuple[weakref.ref[Any], int | None, int]] = {}
        self._dead: deque[weakref.ref[Any]] = deque()

    def write(self, payloads: Sequence[Tensor], after: Sequence[Event] = ()) -> DiskWrite:
        """Queue a write. Whether there was room is unknown until it has ended. Raises a ClosedError
        if the file is closed, and a ForkedError if it belongs to another process.

        Args:
            payloads: Flat contiguous ``uint8`` host tensors. Keep the owner of their bytes until
                the write has ended: the thread keeps the tensors, but a pool may reuse the bytes.
            after: Events that the thread waits for first, such as the copy to the host.
        """
        file = self._open_file()
        views = [as_array(payload).data for payload in payloads]
        extent = self._extent(sum(map(len, views)))
        write = DiskWrite(None, extent)
        self._follow(write, None, extent.nbytes)  # in use until it is garbage
        self._in_use_bytes += extent.nbytes
        self.peak_bytes = max(self.peak_bytes, self._in_use_bytes)
        owner = weakref.ref(write)  # weak: the thread keeps only the extent

        def is_wanted() -> bool:
            return owner() is not None and self._file is not None

        def run() -> None:
            try:
                wait_for_all(after)
                extent.checksum = self._transfer(file, extent, views, self._pwrite, is_wanted)
            except Exception as failure:  # the caller still has the bytes
                extent.failure = self._error(extent, failure)

        write.piece = Piece(self._reported("write", extent.nbytes, run))
        self._threads.queue(write.piece)
        self.written_bytes += extent.nbytes
        return write

    def read_into(
        self, write: DiskWrite, payloads: Sequence[Tensor], after: Sequence[Event] = ()
    ) -> DiskEvent:
        """Queue a read of all bytes of ``write``, which has to live until the read has ended.
        Raises as :meth:`write`.

        Args:
            payloads: Host tensors of as many bytes; undefined until the read has ended well.
            after: Earlier uses of ``payloads``, which the thread waits for first.
        """
        file, extent, written = self._open_file(), write.extent, write.event
        views = [as_array(payload).data for payload in payloads]
        nbytes = extent.nbytes
        assert sum(map(len, views)) == nbytes

        def run() -> DiskTierError | None:
            try:
                # Threads take work in queued order, so the write is at least in progress.
                written.synchronize()
                for event in after:
                    with suppress(Exception):  # an earlier use that failed has ended as well
                        wait_for_all([event])
                if extent.failure is not None:
                    return extent.failure
                if self._transfer(file, extent, views, self._pread) != extent.checksum:
                    raise ValueError("its checksum is not that of what was written")
            except Exception as failure:
                return self._error(extent, failure)
            return None

        self.read_bytes += nbytes
        return DiskEvent(self._threads.submit(self._reported("read", nbytes, run)))

    @property
    def in_use_bytes(self) -> int:
        """Bytes of all living :class:`DiskWrite` objects, exact at the call."""
        self._collect()
        return self._in_use_bytes

    def close(self) -> None:
        """Finish queued reads, cancel queued writes and drop the file. Twice is fine."""
        self._file = None
        self._threads.shutdown()

    def _open_file(self) -> OpenFile:
        check(self._owner, f"the disk tier's file in {self.directory}")
        if self._file is None:
            raise ClosedError("the disk tier is closed; make a new manager to go on")
        return self._file

    def _extent(self, nbytes: int) -> Extent:
        self._collect()
        room = room_for(nbytes)
        start = self._free.take(room)
        if start is None:
            start, self._end = self._end, self._end + room
        extent = Extent(start, nbytes)
        self._follow(extent, start, nbytes)
        return extent

    def _follow(self, owner: object, start: int | None, nbytes: int) -> None:
        ref = weakref.ref(owner, self._dead.append)  # C: see HostPool
        self._live[id(ref)] = ref, start, nbytes

    def _collect(self) -> None:
        while self._dead:
            _, start, nbytes = self._live.pop(id(self._dead.popleft()))
            if start is None:
                self._in_use_bytes -= nbytes
            else:
                self._free.add(start, room_for(nbytes))

    def _reported(self, kind: str, nbytes: int, run: Callable[[], object]) -> Callable[[], object]:
        """Return ``run`` followed by calls of the listeners."""
        listeners = self.listeners

        def run_and_tell() -> object:
            begin_s = time.perf_counter()
            failure = run()
            for tell in listeners:
                tell(kind, nbytes, begin_s, time.perf_counter())
            return failure

        return run_and_tell if listeners else run

    def _transfer(
        self,
        file: OpenFile,
        extent: Extent,
        views: list[memoryview],
        step: Step,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> int:
        """Write or read all of ``views``, unless no longer wanted; return their checksum."""
        total, offset = new_checksum(), extent.start
        for view in views:
            while len(view):  # a system call may do only a part
                if not is_wanted():
                    raise ClosedError("no saved tensor needs it now")
                done = step(file.fd, view[:BLOCK_BYTES], offset)
                if done <= 0:
                    raise ValueError(f"the file ends at {offset}, before the end of the batch")
                total.update(view[:done])
                view, offset = view[done:], offset + done
        return int(total.intdigest())

    def _error(self, extent: Extent, cause: Exception) -> DiskTierError:
        text = str(cause)
        if isinstance(cause, OSError):
            text = f"{cause.strerror} [errno {cause.errno}]"
        return DiskTierError(
            f"disk tier, unnamed file in {self.directory}: {extent.nbytes} bytes at offset "
            f"{extent.start}: {text}; check that file system, or set disk_dir to a "
            "directory on another"
        )


def room_for(nbytes: int) -> int:
    return max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT


def wait_for_all(events: Sequence[Event]) -> None:
    """Block a thread until all events have passed; raises the error of a failed copy."""
    for event in events:
        # The exit waits for threads inside torch. A device's copy ends; a thread's may be stuck.
        with inside_torch() if isinstance(event, torch.Event) else nullcontext():
            event.synchronize()


def unnamed_file(directory: Path) -> int:
    """Return a descriptor of a new file in ``directory``, which is made if need be."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):  # not every system says
            kind = file_system_of(directory)
            if kind in ("tmpfs", "ramfs"):
                logger.warning(
                    "the disk tier's directory %s is on %s, which is memory, so nothing is saved "
                    "there; set disk_dir to a directory on a disk",
                    directory,
                    kind,
                )
        with tempfile.TemporaryFile(prefix="pp_offload-", dir=directory) as file:  # mode 0600
            return os.dup(file.fileno())
    except OSError as failure:
        cause = "it is a file" if directory.is_file() else failure
        raise DiskTierError(
            f"disk tier: no file can be made in {str(directory)!r}: {cause}; set disk_dir to a "
            "directory this process may write to"
        ) from failure


def file_system_of(directory: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Return the kind of file system, such as ``ext4``. Raises an OSError if nothing says it."""
    best, kind = -1, "unknown"
    inside = directory.resolve()
    for line in mounts.read_text().splitlines():
        _, mount, name, *_ = line.split(" ")
        if inside.is_relative_to(mount) and len(mount) >= best:
            best, kind = len(mount), name
    return kind
