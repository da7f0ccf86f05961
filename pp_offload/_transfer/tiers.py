"""Which tiers offloaded bytes go through, as the options say.

engine = make_engine(backend, OffloadConfig(tiers=("host", "disk"), disk_dir="/scratch"))
"""

from __future__ import annotations

from pp_offload._memory.budget import RAISE_IT, HostBudget
from pp_offload._memory.disk import DiskTier
from pp_offload._memory.host import HostTier
from pp_offload._memory.slabs import Allocate
from pp_offload._transfer.disk_direct import DirectDiskEngine
from pp_offload._transfer.disk_staged import StagedDiskEngine
from pp_offload._transfer.engine import TransferEngine
from pp_offload.backends import Backend
from pp_offload.config import OffloadConfig

STAGING_SHARE = 8
"""One part in so many of the host budget is left for what passes through to the disk."""


OR_THE_DISK = f'{RAISE_IT}, or let the disk take the rest with tiers=("host", "disk")'
"""What helps where there is only host memory."""

FOR_THE_WAY = f"{RAISE_IT}: what goes to disk passes through host memory, a whole tensor at a time"
"""What helps where the disk is there already."""


def make_engine(
    backend: Backend,
    config: OffloadConfig,
    allocate: Allocate | None = None,
    *,
    in_one_piece: bool = False,
) -> TransferEngine:
    """A transfer engine for ``config``.

    Args:
        backend: Device to work on.
        config: Says which tiers, and how much of them.
        allocate: Gives host memory in bytes; the backend's when None, which its copies need to be
            asynchronous.
        in_one_piece: Whether each buffer of a host tier without a disk has to be so.

    Raises:
        DiskTierError: The file of the disk tier cannot be made.
    """
    allocate = allocate or backend.allocate_host
    has_disk = "disk" in config.tiers
    advice = FOR_THE_WAY if has_disk else RAISE_IT if in_one_piece else OR_THE_DISK
    whole = HostBudget(config.host_budget_bytes, advice)
    if not has_disk:
        only = HostTier(allocate, whole, may_split=not in_one_piece, trim=backend.trim_host)
        return TransferEngine(backend, only, config.max_in_flight_bytes)
    disk = DiskTier(config.disk_dir)
    host: HostTier | None = None
    if backend.is_host:
        if "host" in config.tiers:
            host = HostTier(allocate, whole, trim=backend.trim_host)
        return DirectDiskEngine(backend, host, config.max_in_flight_bytes, disk)
    if "host" in config.tiers:
        host = HostTier(allocate, whole.but_for(STAGING_SHARE), trim=backend.trim_host)
    staging = HostTier(allocate, whole, may_split=False, trim=backend.trim_host)
    return StagedDiskEngine(backend, host, config.max_in_flight_bytes, disk, staging)
