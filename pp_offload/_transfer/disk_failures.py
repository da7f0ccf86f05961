"""Whether the disk takes bytes, and what is said when it does not.

NOTE [ Two ways to the disk ]
    Where the device is the host, threads write a tensor as it is and read into a new one: see
    ``disk_direct.py``. Elsewhere its bytes pass through staging buffers: see ``disk_staged.py``.

NOTE [ When the disk fails ]
    What could not be written stays where it is, tensor or buffer, and later groups stay on the
    device until the next step tries again. What cannot be read back raises when it is asked for;
    asked for again, it is read again.

    failures.check()        # before room is taken
    failures.note(failure)  # something could not be written
    failures.forget()       # between steps
"""

from __future__ import annotations

import logging

from pp_offload._memory.disk import DiskStatistics
from pp_offload._transfer.tier import TierStatistics
from pp_offload.errors import DiskTierError

logger = logging.getLogger(__name__)


class DiskFailures:
    """What could not be written since the step began."""

    def __init__(self) -> None:
        self._failure: DiskTierError | None = None
        self._has_warned = False

    def check(self) -> None:
        """Raise MemoryError if the disk failed in this step."""
        if self._failure is not None:
            raise MemoryError(str(self._failure)) from self._failure

    def note(self, failure: DiskTierError) -> None:
        """Something could not be written."""
        self._failure = failure
        logger.log(
            logging.DEBUG if self._has_warned else logging.WARNING,
            "offloaded activations could not be written and stay in memory, as will what follows "
            "in this step; from now on without a warning: %s",
            failure,
        )
        self._has_warned = True

    def forget(self) -> None:
        """The next step tries again."""
        self._failure = None


def of_disk(disk: DiskStatistics) -> TierStatistics:
    """What is on disk, and what was written and read."""
    return TierStatistics(
        num_payloads=disk.num_payloads,
        disk_bytes_in_use=disk.in_use,
        disk_bytes_peak=disk.peak,
        disk_bytes_written=disk.written,
        disk_bytes_read=disk.read,
    )
