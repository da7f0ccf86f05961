"""What is known of accelerators: how fast they compute, read their memory, and are copied from.

    h100 = replace(DEVICES["H100"], matmul_fraction=0.7)
    mine = Hardware.from_file("out.json")   # as pp-offload doctor --measure has written it

The rates of :data:`DEVICES` are those of data sheets, for dense bf16. Programs reach a fraction of
them, and a device has costs that no data sheet names: measure them where the device is at hand.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from math import inf
from pathlib import Path

from pp_offload._common.checks import near, said

GB = 10**9

OPTIONAL = (
    *("h2d_bytes_per_s", "both_links_bytes_per_s", "host_bytes_per_s", "pin_bytes_per_s"),
    *("attention_fraction", "attention_backward_fraction"),
)
MAY_BE_ZERO = (
    *("launch_s", "kernel_gap_s", "copy_latency_s", "disk_latency_s"),
    *("d2h_slowdown", "h2d_slowdown", "workspace_bytes"),
)


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
    """To pinned memory of the host, while nothing comes from there."""

    h2d_bytes_per_s: float | None = None
    """From there, while nothing goes to it. None for as much as to the host."""

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

    d2h_slowdown: float = 0.0
    """Part of compute's speed that is lost while copies to the host run."""

    h2d_slowdown: float = 0.0
    """The same of copies from the host. What both take adds up."""

    matmul_fraction: float = 0.6
    """What matrix products reach of their peak."""

    attention_fraction: float | None = None
    """What the forward of attention reaches of that peak. None for as much as products."""

    attention_backward_fraction: float | None = None
    """The same of its backward."""

    memory_fraction: float = 0.8
    """What other operators reach of the memory's peak."""

    launch_s: float = 5e-6
    """The host's time to launch an operator or a copy."""

    kernel_gap_s: float = 0.0
    """How long the device is idle between an operator and the next, if that is launched already."""

    copy_latency_s: float = 10e-6
    """Of a copy to or from the host, beside its bytes."""

    num_queued_launches: int = 1024
    """How many launches the host may be ahead."""

    pin_bytes_per_s: float | None = None
    """Host memory that is pinned, when it is first needed. None if that takes no time."""

    workspace_bytes: int = 0
    """Device memory that libraries take for themselves, as that of matrix products does."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name != "name" and not (value is None and one.name in OPTIONAL):
                _check(one.name, value)
        if self.d2h_slowdown + self.h2d_slowdown >= 1:
            raise ValueError(
                f"d2h_slowdown and h2d_slowdown are {self.d2h_slowdown} and {self.h2d_slowdown}, "
                "expected numbers that add up to less than 1"
            )

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Hardware:
        """Read what ``pp-offload doctor --measure`` has written.

        Raises:
            OSError: The file cannot be read.
            ValueError: It has no ``hardware`` with the fields of this class, or a value is wrong.
        """
        try:
            given = json.loads(Path(path).read_text(encoding="utf-8"))["hardware"]
            names = [field.name for field in fields(cls)]
            for name in given:
                if name not in names:
                    raise ValueError(f"{name!r} is no field of Hardware{near(name, names)}")
            return cls(**given)
        except (ValueError, TypeError, KeyError) as failure:
            raise ValueError(
                f"{os.fspath(path)} is no file of pp-offload doctor --measure: {failure}"
            ) from failure

    @property
    def d2h_rate(self) -> float:
        """Bytes a second of copies to the host while none come from there."""
        return min(self.link_bytes_per_s, self._host_share)

    @property
    def h2d_rate(self) -> float:
        """Bytes a second of copies from the host while none go to it."""
        rate = self.h2d_bytes_per_s
        return min(self.link_bytes_per_s if rate is None else rate, self._host_share)

    @property
    def both_copies_bytes_per_s(self) -> float:
        """What copies in both directions reach together."""
        both = self.both_links_bytes_per_s
        return min(self.d2h_rate + self.h2d_rate if both is None else both, self._host_share)

    @property
    def copies_slow_compute(self) -> bool:
        """Whether operators take longer while copies run."""
        return self.d2h_slowdown + self.h2d_slowdown > 0

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
            name="GH200",
            matmul_flops=990e12,
            memory_bytes_per_s=4000 * GB,
            memory_bytes=96 * GB,
            # NVLink-C2C carries 450 GB/s each way; these are published measurements of copies.
            link_bytes_per_s=170 * GB,
            h2d_bytes_per_s=411 * GB,
            host_bytes_per_s=512 * GB,  # the data sheet's, of Grace's LPDDR5X
        ),
        Hardware(
            name="B200",
            matmul_flops=2250e12,
            memory_bytes_per_s=8000 * GB,
            memory_bytes=180 * GB,
            link_bytes_per_s=50 * GB,
        ),
        Hardware(
            name="GB200",
            matmul_flops=2500e12,
            memory_bytes_per_s=8000 * GB,
            memory_bytes=186 * GB,
            # Of the data sheet: Grace's NVLink-C2C, 450 GB/s each way, and its memory serve two.
            link_bytes_per_s=225 * GB,
            host_bytes_per_s=512 * GB,
            num_devices_per_host=2,
        ),
        Hardware(
            name="GB300",
            matmul_flops=2500e12,
            memory_bytes_per_s=8000 * GB,
            memory_bytes=288 * GB,
            link_bytes_per_s=225 * GB,  # as GB200
            host_bytes_per_s=512 * GB,
            num_devices_per_host=2,
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
"""By name. Links are PCIe unless a row says otherwise: generation 4 for A100, 5 for others."""
