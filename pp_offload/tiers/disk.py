"""Disk space for offloaded bytes: one file, extents from an arena, threads that write and read.

The file has no name, so nothing is left of it when the process and those forked from it have ended,
however they end. Every extent has a checksum, compared when it is read. Only its owner may read it.

    extent = tier.take(nbytes)
    written = tier.write(extent, data)   # data must stay unchanged until the event; then see
    extent.failure                       # what went wrong, if anything
    read = tier.read(extent, target)     # after the write, whoever asks
    tier.give(extent)                    # from any thread, also from a destructor
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pp_offload.errors import ClosedError, DiskTierError
from pp_offload.tiers.arena import Arena, Range
from pp_offload.tiers.checksum import PART_BYTES, Checksum

logger = logging.getLogger(__name__)

ALIGNMENT = 4096
"""Of extents in the file. In bytes."""

GROWTH_BYTES = 2**26
"""The file grows by at least this."""

BLOCK_BYTES = 2 * PART_BYTES
"""Written or read by one system call."""

NUM_THREADS = 4
"""Enough that the disk has work while blocks are summed."""

Step = Callable[[int, memoryview, int], int]
"""Writes or reads at an offset of a file; gives the number of bytes it managed."""


class DiskEvent:
    """The end of some work of the tier's threads."""

    __slots__ = ("_futures",)

    def __init__(self, futures: Sequence[Future[DiskTierError | None]]) -> None:
        self._futures = futures

    @classmethod
    def all_of(cls, events: Sequence[DiskEvent]) -> DiskEvent:
        """The end of all of them."""
        return cls([future for event in events for future in event._futures])

    def query(self) -> bool:
        """Whether it has ended, well or not."""
        return all(future.done() for future in self._futures)

    def synchronize(self) -> None:
        """Block until it has ended.

        Raises:
            DiskTierError: It was reading, and that failed.
        """
        failures = [future.result() for future in self._futures]
        for failure in filter(None, failures):
            raise DiskTierError(str(failure))  # a new one: its traceback holds graphs


class DiskExtent:
    """A range of the file, what was found when it was written, and the work that used it last."""

    __slots__ = ("checksum", "failure", "last_use", "nbytes", "num_parts", "range", "tier")

    def __init__(self, tier: DiskTier, nbytes: int, num_parts: int, range_: Range) -> None:
        self.tier = tier
        self.nbytes = nbytes
        self.num_parts = num_parts
        self.range = range_
        self.checksum: int | None = None
        self.failure: DiskTierError | None = None
        self.last_use: DiskEvent | None = None


@dataclass(frozen=True)
class DiskStatistics:
    """What a disk tier holds and did. In bytes, but for the count."""

    in_use: int = 0
    """In extents that were taken and not given back."""

    peak: int = 0
    """The most that was ever in use."""

    written: int = 0
    """Queued to be written since the tier was made."""

    read: int = 0
    """Queued to be read since the tier was made."""

    num_parts: int = 0
    """Payloads in extents that were taken and not given back."""


class DiskTier:
    """Bytes in an unnamed file.

    Args:
        directory: On a file system with room; made if it does not exist. None for the system's
            directory of temporary files.
        num_threads: How many extents are written or read at a time.

    Raises:
        DiskTierError: The file cannot be made there.
    """

    def __init__(
        self, directory: str | os.PathLike[str] | None = None, num_threads: int = NUM_THREADS
    ) -> None:
        self.directory = Path(directory or tempfile.gettempdir())
        self._fd = _unnamed_file(self.directory)
        self._arena = Arena(alignment=ALIGNMENT)
        self._returned: deque[DiskExtent] = deque()
        self._busy: list[DiskExtent] = []
        self._in_use = self._peak = self._num_parts = 0
        self._written = self._read = 0
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="pp_offload-disk")
        self._is_closed = False

    def take(self, nbytes: int, num_parts: int = 1) -> DiskExtent:
        """An extent of ``nbytes``. That the file system has room is known only after the write.

        Args:
            nbytes: At least one.
            num_parts: How many payloads share it; only counted.

        Raises:
            ClosedError: The tier was closed.
        """
        self._check_open()
        self._collect()
        found = self._arena.allocate(nbytes)
        if found is None:
            self._arena.add_slab(max(GROWTH_BYTES, -(-nbytes // ALIGNMENT) * ALIGNMENT))
            found = self._arena.allocate(nbytes)
        assert found is not None
        self._in_use += nbytes
        self._num_parts += num_parts
        self._peak = max(self._peak, self._in_use)
        return DiskExtent(self, nbytes, num_parts, found)

    def give(self, extent: DiskExtent) -> None:
        """Hand an extent back. Safe in a destructor: it is only noted, and filed later."""
        self._returned.append(extent)

    def write(self, extent: DiskExtent, data: Tensor) -> DiskEvent:
        """Queue writing ``data``, a flat ``uint8`` host tensor of the extent's size.

        Returns:
            An event, which never raises: ``extent.failure`` says what went wrong.

        Raises:
            ClosedError: The tier was closed.
        """
        self._written += extent.nbytes
        source = data.numpy()

        def run() -> DiskTierError | None:
            total = Checksum()
            failure = self._transfer(extent, source, self._pwrite, total)
            if failure is None:
                extent.checksum = total.value()
            else:
                extent.failure = failure
            return None  # the bytes are still where they were

        return self._queue(extent, run)

    def read(self, extent: DiskExtent, target: Tensor) -> DiskEvent:
        """Queue reading into ``target``, a flat ``uint8`` host tensor of the extent's size.

        Returns:
            An event. Its ``synchronize`` raises what went wrong; then the target is garbage.

        Raises:
            ClosedError: The tier was closed.
        """
        self._read += extent.nbytes
        into = target.numpy()

        def run() -> DiskTierError | None:
            if extent.checksum is None:
                return extent.failure or self._error(extent, "it was never written")
            total = Checksum()
            failure = self._transfer(extent, into, self._pread, total)
            if failure is None and total.value() != extent.checksum:
                return self._error(extent, "its checksum is not that of what was written")
            return failure

        return self._queue(extent, run)

    def statistics(self) -> DiskStatistics:
        """Exact at the call."""
        self._collect()
        return DiskStatistics(self._in_use, self._peak, self._written, self._read, self._num_parts)

    def close(self) -> None:
        """Finish what is queued and drop the file. Twice is fine."""
        self._close(wait=True)

    def __del__(self) -> None:
        with suppress(Exception):  # also when the file could not be made
            self._close(wait=False)

    def _close(self, *, wait: bool) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._threads.shutdown(wait=wait)
            os.close(self._fd)

    # What a test of a failing file system replaces

    def _pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def _pread(self, fd: int, into: memoryview, offset: int) -> int:
        return os.preadv(fd, [into], offset)

    def _queue(self, extent: DiskExtent, work: Callable[[], DiskTierError | None]) -> DiskEvent:
        self._check_open()
        # Threads take work in the order it is queued, so what comes before is running at least.
        before = extent.last_use

        def run() -> DiskTierError | None:
            if before is not None:
                with suppress(DiskTierError):
                    before.synchronize()
            return work()

        extent.last_use = DiskEvent([self._threads.submit(run)])
        return extent.last_use

    def _transfer(
        self, extent: DiskExtent, data: NDArray[np.uint8], step: Step, total: Checksum
    ) -> DiskTierError | None:
        """Write or read all of ``data``; what went wrong, if anything.

        It is not raised here: it is kept, and its traceback would keep the data alive. Every block
        is summed while it is in the cache.
        """
        try:
            for begin in range(0, len(data), BLOCK_BYTES):
                block = data[begin : begin + BLOCK_BYTES]
                failure = self._transfer_block(extent, begin, block.data, step)
                if failure is not None:
                    return failure
                total.update(block)
        except Exception as error:  # whatever it is, the bytes are not where they should be
            return self._error(extent, f"{type(error).__name__}: {error}")
        return None

    def _transfer_block(
        self, extent: DiskExtent, begin: int, rest: memoryview, step: Step
    ) -> DiskTierError | None:
        """Go on until it is done, however short the steps are."""
        start, at = self._offset(extent), begin
        while rest:
            try:
                done = step(self._fd, rest, start + at)
            except OSError as failure:
                return self._error(extent, f"{failure.strerror} [errno {failure.errno}]")
            if done <= 0:
                return self._error(extent, f"the file ends {extent.nbytes - at} bytes too early")
            rest, at = rest[done:], at + done
        return None

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the disk tier is closed; make a new manager to go on")

    def _offset(self, extent: DiskExtent) -> int:
        return self._arena.slab_start(extent.range.slab) + extent.range.offset

    def _error(self, extent: DiskExtent, cause: str) -> DiskTierError:
        return DiskTierError(
            f"disk tier, unnamed file in {self.directory}: {extent.nbytes} bytes at offset "
            f"{self._offset(extent)}: {cause}; check that file system, or set disk_dir to a "
            "directory on another"
        )

    def _collect(self) -> None:
        """File what was handed back; what a thread still works on is not to be taken yet."""
        while self._returned:
            extent = self._returned.popleft()
            self._in_use -= extent.nbytes
            self._num_parts -= extent.num_parts
            self._busy.append(extent)
        busy, self._busy = self._busy, []
        for extent in busy:
            if extent.last_use is None or extent.last_use.query():
                self._arena.free(extent.range)
            else:
                self._busy.append(extent)


def _unnamed_file(directory: Path) -> int:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _warn_if_in_memory(directory)
        with suppress(AttributeError, OSError):  # not every file system can
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o600)
        fd, name = tempfile.mkstemp(prefix="pp_offload-", dir=directory)  # mode 0600
        os.unlink(name)
    except OSError as failure:
        raise DiskTierError(
            f"disk tier: no file can be made in {directory}: {failure}; set disk_dir to a "
            "directory this process may write to"
        ) from failure
    return fd


def _warn_if_in_memory(directory: Path) -> None:
    kind = file_system_of(directory)
    if kind in ("tmpfs", "ramfs"):
        logger.warning(
            "the disk tier's directory %s is on %s, which is memory, so nothing is saved there; "
            "set disk_dir to a directory on a disk",
            directory,
            kind,
        )


def file_system_of(directory: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The kind of file system, such as ``ext4``; empty where the system does not say.

    Args:
        directory: Must exist.
        mounts: The kernel's list.
    """
    best, kind = -1, ""
    with suppress(OSError):
        inside = directory.resolve()
        for line in mounts.read_text().splitlines():
            _, place, found, *_ = line.split(" ")
            if inside.is_relative_to(place) and len(place) >= best:
                best, kind = len(place), found
    return kind
