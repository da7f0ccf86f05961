"""Which tiers offloaded bytes go through, as the options say.

engine = make_engine(backend, OffloadConfig(tiers=("host", "disk"), disk_dir="/scratch"))
"""

from __future__ import annotations

from collections.abc import Callable

from pp_offload._memory.budget import RAISE_IT, HostBudget
from pp_offload._memory.disk import DiskFile
from pp_offload._memory.host import HostMemory
from pp_offload._memory.slabs import Allocate
from pp_offload._transfer.copies import Copies
from pp_offload._transfer.disk_direct import DirectDisk
from pp_offload._transfer.disk_staged import StagedDisk
from pp_offload._transfer.engine import TransferEngine
from pp_offload._transfer.host_tier import HostTier
from pp_offload._transfer.tier import Tier, TierSetup
from pp_offload.backends import Backend
from pp_offload.config import OffloadConfig, add_tier_name

MakeTier = Callable[[TierSetup], Tier]
"""Makes a tier as the options say."""

STAGING_SHARE = 8
"""One part in so many of the host budget is left for what passes through to the disk."""


OR_THE_DISK = f'{RAISE_IT}, or let the disk take the rest with tiers=("host", "disk")'
"""What helps where there is only host memory."""

FOR_THE_WAY = f"{RAISE_IT}: what goes to disk passes through host memory, a whole tensor at a time"
"""What helps where the disk is there already."""


def _host(setup: TierSetup) -> Tier:
    trim = setup.copies.backend.trim_host
    return HostTier(setup.copies, HostMemory(setup.allocate, setup.budget_at_rest, trim=trim))


def _disk(setup: TierSetup) -> Tier:
    """See NOTE [ Two ways to the disk ]."""
    copies, directory = setup.copies, setup.config.disk_dir
    disk = copies.backend.open_disk(directory) or DiskFile(directory)
    if copies.backend.is_host:
        return DirectDisk(copies, disk)
    trim = copies.backend.trim_host
    staging = HostMemory(setup.allocate, setup.budget, may_split=False, trim=trim)
    return StagedDisk(copies, disk, staging)


MAKERS: dict[str, MakeTier] = {"host": _host, "disk": _disk}
"""By the name in the options."""


def add_tier(name: str, make: MakeTier) -> None:
    """From now on ``name`` may be in :attr:`OffloadConfig.tiers`, alone or behind the host."""
    MAKERS[name] = make
    add_tier_name(name)


def make_engine(
    backend: Backend,
    config: OffloadConfig,
    allocate: Allocate | None = None,
) -> TransferEngine:
    """A transfer engine for ``config``.

    Args:
        backend: Device to work on.
        config: Says which tiers, and how much of them.
        allocate: Gives so many bytes of host memory. None for the backend's own, which its copies
            need to be asynchronous.

    Raises:
        DiskTierError: The file of the disk tier cannot be made.
    """
    allocate = allocate or backend.allocate_host
    has_disk = "disk" in config.tiers
    whole = HostBudget(config.host_budget_bytes, FOR_THE_WAY if has_disk else OR_THE_DISK)
    passes_through = has_disk and not backend.is_host
    setup = TierSetup(
        copies=Copies(backend, config.max_in_flight_bytes),
        config=config,
        allocate=allocate,
        budget=whole,
        budget_at_rest=whole.but_for(STAGING_SHARE) if passes_through else whole,
    )
    return TransferEngine(setup.copies, [MAKERS[name](setup) for name in config.tiers])


def host_engine(
    backend: Backend, host: HostMemory, max_in_flight_bytes: int | str
) -> TransferEngine:
    """A transfer engine over this host memory alone."""
    copies = Copies(backend, max_in_flight_bytes)
    return TransferEngine(copies, [HostTier(copies, host)])
