"""Which tiers bytes go to, as the options say.

    tier = make_tier(backend, OffloadConfig(tiers=("host", "disk")), backend.allocate_host)

A tier of your own is an object with the methods of :class:`~pp_offload._core.disk.Disk`. Bytes pass
to it as they do to a file: through host memory, or where the device is the host, from there.

    add_tier("own", lambda config: MyStore(...))
    OffloadConfig(tiers=("host", "own"))
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pp_offload._core.disk import Disk, DiskTier
from pp_offload._core.tiers import HostTier, Tier
from pp_offload._memory.budget import RAISE_IT, HostBudget
from pp_offload._memory.disk_file import DiskFile
from pp_offload._memory.host_pool import Allocate, HostPool
from pp_offload._policy.bound import Bound
from pp_offload.backends import Backend
from pp_offload.config import OffloadConfig, add_tier_name

STAGING_SHARE = 8
"""One part in so many of the host budget is left for what passes through to the disk."""

STAGING_BYTES = 2**29
"""How much may pass through where no option says so."""

OR_THE_DISK = f'{RAISE_IT}, or let the disk take the rest with tiers=("host", "disk")'
"""What helps where there is only host memory."""

FOR_THE_WAY = f"{RAISE_IT}: what goes to disk passes through host memory, a whole group at a time"
"""What helps where the disk is there already."""

MakeDisk = Callable[[OffloadConfig], Disk]
"""Makes what bytes go to, as the options say."""

OWN: dict[str, MakeDisk] = {}
"""By name: tiers that somebody added."""


def add_tier(name: str, make: MakeDisk) -> None:
    """From now on ``name`` may be in :attr:`OffloadConfig.tiers`, alone or behind the host."""
    OWN[name] = make
    add_tier_name(name)


def make_tier(backend: Backend, config: OffloadConfig, allocate: Allocate) -> Tier:
    """Where batches go.

    Args:
        backend: The device.
        config: Says which tiers, and how much of them.
        allocate: Gives host memory that copies can use.

    Raises:
        DiskTierError: The file of the disk tier cannot be made.
    """
    first, last = config.tiers[0], config.tiers[-1]
    whole = HostBudget(config.host_budget_bytes, OR_THE_DISK if last == "host" else FOR_THE_WAY)
    passes_through = last != "host" and not backend.is_host
    at_rest = whole.but_for(STAGING_SHARE) if passes_through and first == "host" else whole

    def host_tier(budget: HostBudget) -> HostTier:
        is_capturing = partial(getattr, backend, "is_capturing")
        trim = backend.trim_host
        return HostTier(HostPool(allocate, budget, trim=trim, is_capturing=is_capturing))

    host = host_tier(at_rest) if first == "host" else None
    if host is not None and last == "host":
        return host
    if last in OWN:
        disk = OWN[last](config)
    else:
        disk = backend.open_disk(config.disk_dir) or DiskFile(config.disk_dir)
    staging = host_tier(whole) if passes_through else None
    bound = Bound(config.max_in_flight_bytes, STAGING_BYTES)
    return DiskTier(backend, disk, host, staging, bound, last)
