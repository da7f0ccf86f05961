"""What both ways to the disk share: the file, its failures, its numbers.

NOTE [ Two ways to the disk ]
    Where the device is the host, threads write a tensor as it is and read into a new one: see
    ``disk_direct.py``. Elsewhere its bytes pass through staging buffers: see ``disk_staged.py``.
"""

from __future__ import annotations

from pp_offload._memory.disk import DiskFile
from pp_offload._transfer.copies import Copies
from pp_offload._transfer.disk_failures import DiskFailures
from pp_offload._transfer.ticket import HostCopy
from pp_offload._transfer.tier import Tier, TierStatistics


class OnDisk(Tier):
    """Keeps bytes on disk.

    Args:
        copies: Queues copies, and keeps alive what threads write or read into.
        disk: Where the bytes go.
    """

    name = "disk"
    is_gathering = False

    def __init__(self, copies: Copies, disk: DiskFile) -> None:
        self.disk = disk
        self._copies = copies
        self._failures = DiskFailures()

    def may_capture(self, copy: HostCopy | None = None) -> bool:
        """True only for what could not be written, which is still in memory."""
        return copy is not None and copy.extent is None

    def statistics(self) -> TierStatistics:
        """What is on disk, and what was written and read."""
        disk = self.disk.statistics()
        return TierStatistics(
            num_payloads=disk.num_payloads,
            disk_bytes_in_use=disk.in_use,
            disk_bytes_peak=disk.peak,
            disk_bytes_written=disk.written,
            disk_bytes_read=disk.read,
        )

    def compact(self) -> None:
        """Have the next step try the disk again."""
        self._failures.forget()

    def retire(self) -> None:
        """Drop the file, unless saved tensors need it; then it goes with the last of them."""
        if self.disk.statistics().in_use == 0:
            self.disk.close()

    def close(self) -> None:
        """Drop the file."""
        self.disk.close()
