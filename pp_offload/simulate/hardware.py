"""What is known of accelerators: how fast they compute, read their memory, and are copied from.

The rates are those of NVIDIA's and AMD's data sheets, for dense bf16. What programs reach of them
is a fraction, which differs by program: measure it, and replace it.

    h100 = replace(DEVICES["H100"], matmul_fraction=0.7)
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf

from pp_offload._common.checks import said

GB = 10**9

OPTIONAL = ("both_links_bytes_per_s", "host_bytes_per_s")
MAY_BE_ZERO = ("launch_s", "copy_latency_s", "copy_slowdown", "disk_latency_s")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One accelerator and its link to the host.

    Raises:
        ValueError: A rate or a count is not above 0, a time is below, a fraction is above 1, or
            compute would stand still while copies run.
    """

    name: str

    matmul_flops: float
    """Peak of dense bf16 matrix products, in floating point operations a second."""

    memory_bytes_per_s: float
    """Peak of the device's own memory."""

    memory_bytes: int
    """How much of it there is."""

    link_bytes_per_s: float
    """To the host, and as much from there, from pinned memory; what one direction alone reaches."""

    both_links_bytes_per_s: float | None = None
    """What both directions at once reach together. None if neither is in the other's way."""

    host_bytes_per_s: float | None = None
    """What copies of all devices of a host reach together, in both directions: its memory's rate.
    Each device has an equal share of it, whatever the others do. None for more than they ask for.
    """

    num_devices_per_host: int = 1
    """That have a part of it."""

    disk_write_bytes_per_s: float = 4 * GB
    """Of the disk that this device has for itself: what an NVMe drive of a server sustains."""

    disk_read_bytes_per_s: float = 6.5 * GB
    """The same for reads."""

    disk_latency_s: float = 100e-6
    """Of a write or a read, beside its bytes."""

    copy_slowdown: float = 0.0
    """The part of compute's speed that is lost while copies run. They take some of the memory's."""

    matmul_fraction: float = 0.6
    """What matrix products reach of their peak."""

    memory_fraction: float = 0.8
    """What other operators reach of the memory's peak."""

    launch_s: float = 5e-6
    """The host's time to launch an operator or a copy."""

    copy_latency_s: float = 10e-6
    """Of a copy to or from the host, beside its bytes."""

    num_queued_launches: int = 1024
    """How many launches the host may be ahead."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name != "name" and not (value is None and one.name in OPTIONAL):
                _check(one.name, value)

    @property
    def copy_bytes_per_s(self) -> float:
        """What copies in one direction reach while none run in the other."""
        return min(self.link_bytes_per_s, self._host_share)

    @property
    def both_copies_bytes_per_s(self) -> float:
        """What copies in both directions reach together."""
        both = self.both_links_bytes_per_s
        return min(2 * self.link_bytes_per_s if both is None else both, self._host_share)

    @property
    def _host_share(self) -> float:
        rate = self.host_bytes_per_s
        return inf if rate is None else rate / self.num_devices_per_host


def _check(name: str, value: object) -> None:
    is_count, may_be_zero = name.startswith("num_"), name in MAY_BE_ZERO
    is_number = isinstance(value, int if is_count else int | float) and not isinstance(value, bool)
    if not is_number or not (value > 0 or (may_be_zero and value == 0)):  # type: ignore[operator]
        least = "at least 0" if may_be_zero else "above 0"
        kind = ", an integer" if is_count else ""
        raise ValueError(f"{name} is {said(value)}, expected a number {least}{kind}")
    if name.endswith("_fraction") and value > 1:  # type: ignore[operator]
        raise ValueError(f"{name} is {said(value)}, expected at most 1")
    if name == "copy_slowdown" and value >= 1:  # type: ignore[operator]
        raise ValueError(f"{name} is {said(value)}, expected a number below 1")


DEVICES: dict[str, Hardware] = {
    one.name: one
    for one in (
        Hardware(
            name="A100",
            matmul_flops=312e12,
            memory_bytes_per_s=2039 * GB,
            memory_bytes=80 * GB,
            link_bytes_per_s=25 * GB,
        ),
        Hardware(
            name="H100",
            matmul_flops=990e12,
            memory_bytes_per_s=3350 * GB,
            memory_bytes=80 * GB,
            link_bytes_per_s=50 * GB,
        ),
        Hardware(
            name="H200",
            matmul_flops=990e12,
            memory_bytes_per_s=4800 * GB,
            memory_bytes=141 * GB,
            link_bytes_per_s=50 * GB,
        ),
        Hardware(
            name="B200",
            matmul_flops=2250e12,
            memory_bytes_per_s=8000 * GB,
            memory_bytes=180 * GB,
            link_bytes_per_s=50 * GB,
        ),
        Hardware(
            name="MI300X",
            matmul_flops=1307e12,
            memory_bytes_per_s=5300 * GB,
            memory_bytes=192 * GB,
            link_bytes_per_s=50 * GB,
        ),
    )
}
"""By name. Links are PCIe: generation 4 for A100, 5 for the others; what one direction reaches."""
