"""What a rank has off its device, over all its steps: the engine's own tiers, over memory and a
file without bytes.

    places = NumberPlaces(config, hardware)
    places.settle()                               # between steps
    tier = places.tier(device, begin_s=0.0)       # of a step, which begins then
    places.peak_bytes
"""

from __future__ import annotations

from functools import partial
from typing import Any

from pp_offload._core.bound import Bound
from pp_offload._core.tiers import STAGING_BYTES, STAGING_SHARE, DiskTier, HostTier
from pp_offload._memory.budget import UNLIMITED
from pp_offload._memory.disk_file import DiskWrite, Extent
from pp_offload._memory.host_pool import HostPool
from pp_offload.config import OffloadConfig
from pp_offload.plan.device import Bytes, Held, HostNumbers, NumberDevice, OnDevice
from pp_offload.simulate.clocks import HostClock
from pp_offload.simulate.disk import DiskClock, VirtualFile
from pp_offload.simulate.hardware import Hardware


class NumberBudget:
    """A limit for one rank, which counts in no process.

    Args:
        limit_bytes: The most that may be reserved.
        taken: Counts what is, also by other budgets of the rank.
    """

    advice = ""

    def __init__(self, limit_bytes: int, taken: Bytes) -> None:
        self.limit_bytes = limit_bytes
        self._taken = taken

    @property
    def left_bytes(self) -> int:
        """See :class:`HostBudget`."""
        return max(0, self.limit_bytes - self._taken.live)

    def reserve(self, nbytes: int, *, force: bool = False) -> Held | None:
        """See :class:`HostBudget`."""
        if nbytes > self.left_bytes and not force:
            return None
        self._taken.add(nbytes)
        return Held(self._taken, nbytes)


class NumberFile(VirtualFile):
    """A file of which only the times of reads and writes are known.

    Args:
        clock: Of the disk.
    """

    def __init__(self, clock: DiskClock) -> None:
        self._clock = clock
        self.listeners = ()
        self.written_bytes = self.read_bytes = 0

    def _open_file(self) -> Any:
        """There is none."""

    def _extent(self, nbytes: int) -> Extent:
        return Extent(0, nbytes)  # a disk has no end

    def _in_use(self, write: DiskWrite) -> DiskWrite:
        return write  # nobody asks how much is


class NumberPlaces:
    """Host memory and disk of one rank.

    Args:
        config: Says which, and how much; without a limit it has as much as it needs.
        hardware: Has the disk's rates.
    """

    def __init__(self, config: OffloadConfig, hardware: Hardware) -> None:
        self._back_to = OnDevice()
        self._bound = Bound(config.max_in_flight_bytes, STAGING_BYTES)
        self._disk = DiskClock(HostClock(hardware))
        limit_bytes = UNLIMITED if config.host_budget_bytes is None else config.host_budget_bytes
        left_bytes = limit_bytes // STAGING_SHARE if config.tiers == ("host", "disk") else 0
        taken = Bytes()
        self._pools = {
            name: self._pool(NumberBudget(limit_bytes - left_bytes * (name == "host"), taken))
            for name in config.tiers
        }
        """By tier; that of a disk is what bytes pass through."""

    def _pool(self, budget: Any) -> HostPool:
        allocate: Any = partial(HostNumbers, self._back_to)
        return HostPool(allocate, budget)

    def tier(self, device: NumberDevice, begin_s: float) -> HostTier:
        """That of a step.

        Args:
            device: Of the step.
            begin_s: When it begins, by the clock of the one before.
        """
        self._back_to.memory = device.memory
        before, self._disk = self._disk, DiskClock(device.host)
        # What is written for nobody may take longer than the step that has queued it.
        self._disk.free_at_s = max(0.0, before.free_at_s - begin_s)
        host = HostTier(self._pools["host"]) if "host" in self._pools else None
        if "disk" in self._pools:
            backend: Any = device
            staging, file = self._pools["disk"], NumberFile(self._disk)
            return DiskTier(staging, self._bound, backend, file, host)
        assert host is not None
        return host

    def settle(self) -> None:
        """Between steps, when all copies are over and clocks begin anew."""
        for pool in self._pools.values():
            pool.settle()
            pool.forget_copies()

    @property
    def peak_bytes(self) -> int:
        """The most that was in use at a time, at rest and on the way to the disk."""
        return sum([pool.peak_bytes for pool in self._pools.values()])
