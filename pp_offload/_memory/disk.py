"""Disk space for offloaded bytes: one file, extents from an arena, threads that write and read.

The file has no name, so nothing is left of it when the process and those forked from it have ended,
however they end. Only the user it belongs to may open it. Every extent has a checksum, which is
compared when the extent is read.

    extent = file.allocate(nbytes)
    written = file.write(extent, data)   # data must stay unchanged until the event; then see
    extent.failure                       # what went wrong, if anything
    read = file.read(extent, target)     # runs after the write
    del extent                           # on any thread: what is not written yet never is

The truth is in the extents and file ranges that somebody refers to; the arena and the counts are
books, made anew after an interrupt: see NOTE [ Ground truth ]. A forked process has the parent's
file open as well, and must not touch it: ``allocate``, ``write`` and ``read`` raise there.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pp_offload._common.checks import check_count
from pp_offload._common.processes import check, current
from pp_offload._common.workers import Workers, inside_torch
from pp_offload._memory.arena import Arena, Range
from pp_offload._memory.checksum import Checksum, new_checksum
from pp_offload._memory.disk_file import file_system_of as file_system_of
from pp_offload._memory.disk_file import unnamed_file, usable_directory
from pp_offload._memory.loans import Loans
from pp_offload._memory.storages import as_array
from pp_offload._memory.unfinished import wait_for
from pp_offload.backends import Event
from pp_offload.errors import ClosedError, DiskTierError

logger = logging.getLogger(__name__)

ALIGNMENT = 4096
"""Alignment of extents in the file, in bytes."""

GROWTH_BYTES = 2**26
"""The file grows by at least this."""

BLOCK_BYTES = 2**19
"""Written or read by one system call."""

NUM_THREADS = 4
"""Enough that the disk has work while blocks are summed."""

_ReadOrWrite = Callable[[int, memoryview, int], int]
"""Writes or reads at an offset of a file; gives the number of bytes it managed."""


class DiskWork(Protocol):
    """What was queued for a disk: for a thread, a piece of work."""

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        ...

    def result(self) -> Any:
        """Block until it has ended; the failure, if there was one."""
        ...


class DiskEvent:
    """The end of some work of the file's threads. One without work has ended."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: Sequence[DiskWork] = ()) -> None:
        self.pieces = pieces

    @classmethod
    def all_of(cls, events: Sequence[DiskEvent]) -> DiskEvent:
        """The end of all of them."""
        return cls([piece for event in events for piece in event.pieces])

    def follow(self, piece: DiskWork) -> None:
        """Have it end with ``piece``, which is about to be queued."""
        self.pieces = (piece,)

    def query(self) -> bool:
        """Whether it has ended, well or not."""
        return all(piece.done() for piece in self.pieces)

    def synchronize(self) -> None:
        """Block until it has ended.

        Raises:
            DiskTierError: It was reading, and that failed.
            ForkedError: It was queued before this process was forked.
        """
        failures = [piece.result() for piece in self.pieces]
        for failure in filter(None, failures):
            raise DiskTierError(str(failure))  # a new one: a traceback holds graphs


class FileRange:
    """A range of the file, and how writing it went.

    An extent refers to it, and so does a thread while it works on it. Nobody else gets the range
    before both are done.
    """

    __slots__ = ("__weakref__", "checksum", "failure", "nbytes", "range", "start")

    def __init__(self, nbytes: int, range_: Range, start: int) -> None:
        self.nbytes = nbytes
        self.range = range_
        self.start = start
        self.checksum: int | None = None
        self.failure: DiskTierError | None = None


class DiskExtent:
    """Room in the file for as long as anybody refers to this object.

    Attributes:
        file_range: Where it is.
        last_use: The work that was queued last.
    """

    __slots__ = ("__weakref__", "last_use", "file_range")

    def __init__(self, file_range: FileRange) -> None:
        self.file_range = file_range
        self.last_use: DiskEvent | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that were asked for."""
        return self.file_range.nbytes

    @property
    def checksum(self) -> int | None:
        """The checksum of what was written; None before."""
        return self.file_range.checksum

    @property
    def failure(self) -> DiskTierError | None:
        """Why it could not be written."""
        return self.file_range.failure

    @property
    def was_sent(self) -> bool:
        """Whether it is being written, or was, well or not."""
        under_way = self.last_use is not None and not self.last_use.query()
        return under_way or self.checksum is not None or self.failure is not None


NO_EXTENT = DiskExtent(FileRange(0, Range(0, 0, 0, 0), 0))
"""Room for nothing."""


@dataclass(frozen=True, slots=True)
class _Size:
    """The size of one extent, or of several."""

    nbytes: int
    num_payloads: int

    def plus(self, other: _Size) -> _Size:
        return _Size(self.nbytes + other.nbytes, self.num_payloads + other.num_payloads)

    def minus(self, other: _Size) -> _Size:
        return _Size(self.nbytes - other.nbytes, self.num_payloads - other.num_payloads)


class _File:
    """A file without a name, open for as long as anybody refers to this object.

    The threads that write do, so one of them closes a file that was ever written: what a signal
    handler raises in a destructor is lost, and signals are handled on the main thread.
    """

    __slots__ = ("_fds",)

    def __init__(self, fd: int) -> None:
        self._fds = [fd]

    @property
    def fd(self) -> int:
        """The descriptor for system calls; an error once the file is closed."""
        return self._fds[0]

    def close(self) -> None:
        """Twice is fine."""
        while self._fds:
            os.close(self._fds.pop())

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True)
class DiskStatistics:
    """What the file holds and did. In bytes, but for the count."""

    in_use: int = 0
    """Bytes in extents that somebody has."""

    peak: int = 0
    """The most that was ever in use."""

    written: int = 0
    """Bytes queued to be written since the file was made."""

    read: int = 0
    """Bytes queued to be read since the file was made."""

    num_payloads: int = 0
    """Payloads in extents that somebody has."""


class DiskFile:
    """Bytes in an unnamed file.

    Args:
        directory: On a file system with room; made if it does not exist. None for the system's
            directory of temporary files.
        num_threads: How many extents are written or read at a time.

    Raises:
        DiskTierError: The file cannot be made there.
        TypeError: ``directory`` is no path.

    Attributes:
        heard: Told, by the thread, of what is queued from now on when it is over: whether it was a
            ``write`` or a ``read``, of how many bytes, its begin and its end by ``perf_counter``.
    """

    range_type: ClassVar[type[FileRange]] = FileRange
    """The class of its ranges."""

    def __init__(
        self, directory: str | os.PathLike[str] | None = None, num_threads: int = NUM_THREADS
    ) -> None:
        check_count("num_threads", num_threads, least=1)
        self.directory = usable_directory(directory)
        self._file = _File(unnamed_file(self.directory))
        self._threads = Workers("disk", num_threads, keep=self._file)
        self._owner = current()
        self._written = self._read = 0
        self.heard: tuple[Callable[[str, int, float, float], None], ...] = ()
        self._is_closed = False
        # What is there
        self._slabs: list[int] = []
        self._extents = Loans[_Size]()
        self._file_ranges = Loans[Range]()
        # The books
        self._is_suspect = False
        self._arena = Arena(alignment=ALIGNMENT)
        self._in_use = _Size(0, 0)
        self._peak = 0

    def allocate(self, nbytes: int, num_payloads: int = 1) -> DiskExtent:
        """An extent of ``nbytes``. That the file system has room is known only after the write.

        Args:
            nbytes: At least one.
            num_payloads: How many payloads share it; only counted.

        Returns:
            It is taken for as long as anybody refers to this object.

        Raises:
            ClosedError: It was closed.
            ForkedError: It is that of another process.
        """
        self._check_open()
        self._settle()
        self._is_suspect = True
        range_, size = self._range(nbytes), _Size(nbytes, num_payloads)
        file_range = self.range_type(
            nbytes, range_, self._arena.slab_start(range_.slab) + range_.offset
        )
        self._file_ranges.add(file_range, range_)
        extent = DiskExtent(file_range)
        self._extents.add(extent, size)
        self._in_use = self._in_use.plus(size)
        self._peak = max(self._peak, self._in_use.nbytes)
        self._is_suspect = False
        return extent

    def write(self, extent: DiskExtent, data: Tensor, ended: DiskEvent | None = None) -> DiskEvent:
        """Queue writing ``data``, a flat ``uint8`` host tensor of the extent's size.

        Once nobody refers to the extent, the rest of it is not written.

        Args:
            extent: Where.
            data: What; it must not change until it was written.
            ended: An event to use in place of a new one, so that the next user of the memory of
                ``data`` knows it before anything is queued.

        Returns:
            An event, which never raises: ``extent.failure`` says what went wrong.

        Raises:
            ClosedError: It was closed.
            ForkedError: It is that of another process.
        """
        # numpy() has the storage refuse another size for good: without memory a thread would crash.
        source, file_range, owner = data.numpy(), extent.file_range, weakref.ref(extent)

        def run() -> DiskTierError | None:
            total = new_checksum()
            failure = self._transfer(file_range, source, self._pwrite, total, owner)
            if failure is None:
                file_range.checksum = total.intdigest()
            else:
                file_range.failure = failure
            return None  # the bytes are still where they were

        event = self._queue("write", extent, run, ended)
        self._written += extent.nbytes
        return event

    def read(
        self,
        extent: DiskExtent,
        target: Tensor,
        ended: DiskEvent | None = None,
        after: Sequence[Event] = (),
    ) -> DiskEvent:
        """Queue reading into ``target``, a flat ``uint8`` host tensor of the extent's size.

        Args:
            extent: From where.
            target: Garbage until it was read.
            ended: As for :meth:`write`.
            after: Earlier uses of the target, which the thread waits for.

        Returns:
            An event. Its ``synchronize`` raises what went wrong; then the target is garbage.

        Raises:
            ClosedError: It was closed.
            ForkedError: It is that of another process.
        """
        into, file_range = as_array(target), extent.file_range

        def run() -> DiskTierError | None:
            if file_range.checksum is None:
                return file_range.failure or self._error(file_range, "it was never written")
            total = new_checksum()
            failure = self._transfer(file_range, into, self._pread, total)
            if failure is None and total.intdigest() != file_range.checksum:
                return self._error(file_range, "its checksum is not that of what was written")
            return failure

        event = self._queue("read", extent, run, ended, after)
        self._read += extent.nbytes
        return event

    def statistics(self) -> DiskStatistics:
        """Exact at the call."""
        self._settle()
        now = self._in_use
        return DiskStatistics(now.nbytes, self._peak, self._written, self._read, now.num_payloads)

    def close(self) -> None:
        """Finish what is queued and wanted, and drop the file. Twice is fine."""
        self._is_closed = True
        self._threads.shutdown()
        self._file.close()

    # What a test of a failing file system replaces

    def _pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def _pread(self, fd: int, into: memoryview, offset: int) -> int:
        return os.preadv(fd, [into], offset)

    def _queue(
        self,
        name: str,
        extent: DiskExtent,
        work: Callable[[], DiskTierError | None],
        ended: DiskEvent | None,
        after: Sequence[Event] = (),
    ) -> DiskEvent:
        self._check_open()
        # Threads take work in the order it is queued, so what comes before is running at least.
        before = extent.last_use
        earlier = after if before is None else (before, *after)
        nbytes, heard = extent.nbytes, self.heard

        def run() -> DiskTierError | None:
            for event in earlier:  # a copy ends; a disk may be stuck, and must not hold up exit
                with nullcontext() if isinstance(event, DiskEvent) else inside_torch():
                    wait_for((event,))
            if not heard:
                return work()
            begin_s = time.perf_counter()
            failure = work()
            for tell in heard:
                tell(name, nbytes, begin_s, time.perf_counter())
            return failure

        event = DiskEvent() if ended is None else ended
        piece = self._threads.piece(run)
        try:
            extent.last_use = event
            event.follow(piece)
            self._threads.queue(piece)
        except BaseException:
            if piece.call_off():  # or whoever waits for the event would wait for ever
                extent.last_use = before
            raise
        return event

    def _transfer(
        self,
        file_range: FileRange,
        data: NDArray[np.uint8],
        step: _ReadOrWrite,
        total: Checksum,
        owner: Callable[[], object] = lambda: True,
    ) -> DiskTierError | None:
        """Write or read all of ``data``, while it has an owner; returns what went wrong, if any.

        A failure is not raised: it is kept, and its traceback would keep the data alive. Every
        block goes into the checksum while it is in the CPU's cache.
        """
        try:
            for begin in range(0, len(data), BLOCK_BYTES):
                if owner() is None:
                    return self._error(file_range, "nobody needs it any more")
                block = data[begin : begin + BLOCK_BYTES]
                failure = self._transfer_block(file_range, begin, block.data, step)
                if failure is not None:
                    return failure
                total.update(block.data)
        except Exception as error:  # whatever it is, the bytes are not where they should be
            return self._error(file_range, f"{type(error).__name__}: {error}")
        return None

    def _transfer_block(
        self, file_range: FileRange, begin: int, rest: memoryview, step: _ReadOrWrite
    ) -> DiskTierError | None:
        """Write or read one block, however little of it a system call does at a time."""
        at = begin
        while rest:
            try:
                done = step(self._file.fd, rest, file_range.start + at)
            except OSError as failure:
                return self._error(file_range, f"{failure.strerror} [errno {failure.errno}]")
            if done <= 0:
                return self._error(
                    file_range, f"the file ends {file_range.nbytes - at} bytes too early"
                )
            rest, at = rest[done:], at + done
        return None

    def _check_open(self) -> None:
        check(self._owner, f"the disk tier's file in {self.directory}")
        if self._is_closed:
            raise ClosedError("the disk tier is closed; make a new manager to go on")

    def _error(self, file_range: FileRange, cause: str) -> DiskTierError:
        return DiskTierError(
            f"disk tier, unnamed file in {self.directory}: {file_range.nbytes} bytes at offset "
            f"{file_range.start}: {cause}; check that file system, or set disk_dir to a "
            "directory on another"
        )

    def _range(self, nbytes: int) -> Range:
        found = self._arena.allocate(nbytes)
        if found is None:
            self._slabs.append(max(GROWTH_BYTES, -(-nbytes // ALIGNMENT) * ALIGNMENT))
            self._arena.add_slab(self._slabs[-1])
            found = self._arena.allocate(nbytes)
        assert found is not None
        return found

    def _settle(self) -> None:
        """Take back what nobody has any more; first make the books anew if need be."""
        if self._is_suspect:
            self._make_books()
        self._is_suspect = True
        for size in self._extents.ended():
            self._in_use = self._in_use.minus(size)
        for range_ in self._file_ranges.ended():
            self._arena.free(range_)
        self._is_suspect = False

    def _make_books(self) -> None:
        """Make the books from what is there, after an interrupt while they were changed."""
        self._in_use = _Size(0, 0)
        for size in self._extents.audit():
            self._in_use = self._in_use.plus(size)
        self._arena = Arena.of(self._slabs, self._file_ranges.audit(), ALIGNMENT)
