"""What a user can choose, in one frozen record that is checked as a whole."""

from __future__ import annotations

import os
from dataclasses import dataclass

from pp_offload.errors import ConfigError

MIB = 2**20

TIERS = (("host",), ("disk",), ("host", "disk"))
"""The chains there are."""

SPLIT_BACKWARD = ("reload", "keep")
"""What may happen between the two parts of a backward."""


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Options of the engine.

    Raises:
        ConfigError: One error that lists every violation.
    """

    min_offloaded_tensor_size: int = 1024 * 1024
    """Smaller tensors stay on the device. In elements, as in the reference."""

    delta_offload_bytes_across_pp_ranks: int = 0
    """Pipeline rank r keeps at least r times this many bytes on its device."""

    activation_offload_fraction: float = 1.0
    """Of the groups of a chunk that may be offloaded, the share that is; the last ones stay."""

    max_in_flight_bytes: int = 512 * MIB
    """Device bytes that may wait for their copy; beyond it compute waits.

    Also the host bytes that may be on the way to and from the disk, behind an accelerator.
    """

    prefetch_bytes: int | None = None
    """Bytes reloaded ahead of their use; None means twice the largest group, at least 256 KiB.

    One tensor may always be ahead, however large.
    """

    split_backward: str = "reload"
    """Where a schedule's backward comes in two parts, inputs' gradients first: what both parts use
    is given up in between, and reloaded (``"reload"``), or stays on the device (``"keep"``).
    """

    host_budget_bytes: int | None = None
    """Host memory that all managers of this process may take together.

    None means this rank's part of 80 % of what the kernel and the cgroups would still give.
    """

    tiers: tuple[str, ...] = ("host",)
    """Where offloaded bytes go, in this order: ``"host"`` memory up to its budget, ``"disk"``.

    One of them or both. On a CPU-only machine only the disk makes memory smaller.
    """

    disk_dir: str | os.PathLike[str] | None = None
    """Directory of the disk tier's file, one per rank; None means that of temporary files.

    Put it on a real disk: where it is kept in memory, nothing is saved. The file has no name, mode
    0600, and is gone with the process and those forked from it.
    """

    numa_node: int | None = None
    """Place host memory on this NUMA node; None leaves that to the system."""

    verify: bool = False
    """Compare what comes back with what left; log what offload did not free, and who holds it.

    Slow.
    """

    def __post_init__(self) -> None:
        problems = list(self._violations())
        if problems:
            raise ConfigError("OffloadConfig is invalid: " + "; ".join(problems))

    def _violations(self) -> list[str]:
        found = []
        for name in (
            "min_offloaded_tensor_size",
            "delta_offload_bytes_across_pp_ranks",
            "max_in_flight_bytes",
            "prefetch_bytes",
            "host_budget_bytes",
            "numa_node",
        ):
            value = getattr(self, name)
            if value is None and name in ("prefetch_bytes", "host_budget_bytes", "numa_node"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                found.append(f"{name} is {value!r}, expected an integer of at least 0")
        fraction = self.activation_offload_fraction
        is_number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
        if not is_number or not 0 <= fraction <= 1:
            found.append(f"activation_offload_fraction is {fraction!r}, expected 0 to 1")
        if self.split_backward not in SPLIT_BACKWARD:
            found.append(
                f"split_backward is {self.split_backward!r}, expected "
                + " or ".join(map(repr, SPLIT_BACKWARD))
            )
        if not isinstance(self.verify, bool):
            found.append(f"verify is {self.verify!r}, expected True or False")
        if self.tiers not in TIERS:
            found.append(
                f"tiers is {self.tiers!r}, expected one of {', '.join(map(repr, TIERS))}: a tuple, "
                "the host before the disk"
            )
        if self.disk_dir is not None:
            if not isinstance(self.disk_dir, str | os.PathLike) or not os.fspath(self.disk_dir):
                found.append(f"disk_dir is {self.disk_dir!r}, expected a path, or None")
            elif self.tiers in TIERS and "disk" not in self.tiers:
                found.append(
                    f"disk_dir is {os.fspath(self.disk_dir)!r}, but tiers is {self.tiers!r}; add "
                    '"disk" to tiers, or leave disk_dir out'
                )
        return found
