"""Figures of accelerators: rates of compute, of memory, and of copies to and from the host.

    h100 = replace(DEVICES["H100"], matmul_fraction=0.7)
    mine = Hardware.from_file("out.json")   # written by pp-offload doctor --measure

The rates of :data:`DEVICES` come from data sheets, for dense bf16. Programs reach a fraction of
them, and devices have costs missing from data sheets: measure them if the device is available.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, fields, replace
from math import inf
from pathlib import Path

from pp_offload._common.checks import brief, check_count, check_names, near
from pp_offload._common.text import GB

MAY_BE_ZERO = (
    *("launch_s", "kernel_gap_s", "copy_latency_s"),
    *("d2h_slowdown", "h2d_slowdown", "workspace_bytes"),
)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Figures of an accelerator and of its link to the host.

    Raises:
        ValueError: A rate or a count is not above 0, a time is below, a fraction is above 1, or
            compute would stand still while copies run.
    """

    name: str

    matmul_flops: float
    """Peak of dense bf16 matrix products, in floating point operations a second."""

    memory_bytes_per_s: float
    """Peak rate of the device's own memory."""

    memory_bytes: int
    """Size of the device's memory."""

    link_bytes_per_s: float
    """Rate of copies to pinned host memory, while no copies come from the host."""

    h2d_bytes_per_s: float | None = None
    """Rate of copies from the host, while none go there. None for the rate to the host."""

    both_links_bytes_per_s: float | None = None
    """Sum of the rates in both directions at once, as the link and host memory allow; of host
    memory, an equal share where several devices share a host. None if neither slows the other.
    """

    d2h_slowdown: float = 0.0
    """Part of compute's speed that is lost while copies to the host run."""

    h2d_slowdown: float = 0.0
    """Part of compute's speed lost while copies from the host run. Both losses add up."""

    matmul_fraction: float = 0.6
    """Part of ``matmul_flops`` that matrix products reach."""

    attention_fraction: float | None = None
    """Part of ``matmul_flops`` that attention's forward reaches. None for ``matmul_fraction``."""

    attention_backward_fraction: float | None = None
    """Part of ``matmul_flops`` that attention's backward reaches. None for the forward's."""

    memory_fraction: float = 0.8
    """Part of ``memory_bytes_per_s`` that other operators reach."""

    launch_s: float = 5e-6
    """Time of the host to launch an operator or a copy."""

    kernel_gap_s: float = 0.0
    """Idle time of the device between an operator and the next, if the next is launched already."""

    copy_latency_s: float = 10e-6
    """Time of a copy to or from the host, in addition to its bytes."""

    num_queued_launches: int = 1024
    """Most launches that the host may be ahead."""

    pin_bytes_per_s: float | None = None
    """Rate at which host memory is pinned on first use. None if pinning takes no time."""

    workspace_bytes: int = 0
    """Device memory that libraries allocate for themselves, as for matrix products."""

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if name == "name" or (value is None and field.default is None):
                continue
            check_number(name, value, may_be_zero=name in MAY_BE_ZERO)
            if name.startswith("num_"):
                check_count(name, value)
            if name.endswith("_fraction") and value > 1:
                raise ValueError(f"{name} is {brief(value)}, expected at most 1")
        if self.d2h_slowdown + self.h2d_slowdown >= 1:
            raise ValueError(
                f"d2h_slowdown and h2d_slowdown are {self.d2h_slowdown} and {self.h2d_slowdown}, "
                "expected numbers that add up to less than 1"
            )

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Hardware:
        """Read figures that ``pp-offload doctor --measure`` wrote.

        Raises:
            OSError: The file cannot be read.
            ValueError: The file has no ``hardware`` with this class's fields, or a wrong value.
        """
        try:
            given = json.loads(Path(path).read_text(encoding="utf-8"))["hardware"]
            check_names(given, [field.name for field in fields(cls)], "Hardware")
            return cls(**given)
        except (ValueError, TypeError, KeyError) as failure:
            raise ValueError(
                f"{os.fspath(path)} is no file of pp-offload doctor --measure: {failure}"
            ) from failure

    @property
    def h2d_rate(self) -> float:
        """Bytes a second of copies from the host while none go to the host."""
        return self.link_bytes_per_s if self.h2d_bytes_per_s is None else self.h2d_bytes_per_s


def check_number(name: str, value: object, *, may_be_zero: bool = False) -> None:
    """Check that a value is an int or a float above 0, as a rate, which may be infinite; or of at
    least 0, as a time, which may not. ``True`` is neither.
    """
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else -1
    if not (0 <= number < inf if may_be_zero else number > 0):
        least = "of at least 0 and not infinite" if may_be_zero else "above 0"
        raise ValueError(f"{name} is {brief(value)}, expected a number {least}")


def _row(name: str, tflops: int, memory_gb_per_s: int, memory_gb: int, link_gb: int) -> Hardware:
    return Hardware(
        name=name,
        matmul_flops=tflops * 1e12,
        memory_bytes_per_s=memory_gb_per_s * GB,
        memory_bytes=memory_gb * GB,
        link_bytes_per_s=link_gb * GB,
    )


# Grace's LPDDR5X has 512 GB/s by its data sheet. A GB200 or GB300 shares it with a second device.
GH200 = replace(
    _row("GH200", 990, 4000, 96, 170),
    h2d_bytes_per_s=411 * GB,  # NVLink-C2C has 450 GB/s each way; this is a published measurement
    both_links_bytes_per_s=512 * GB,
)


class _Devices(dict[str, Hardware]):
    """Rows by name. Other spellings of a name, such as ``"H100-SXM"``, give its row, too."""

    def __missing__(self, name: str) -> Hardware:
        row = re.sub(r"[-_ ]?SXM\d?$", "", str(name).upper())
        if row not in self:
            names = list(self)
            raise KeyError(f"found {name!r}{near(name, names)}, expected one of {', '.join(names)}")
        return self[row]


DEVICES: dict[str, Hardware] = _Devices(
    (device.name, device)
    for device in (
        _row("A100", 312, 2039, 80, 25),
        _row("H100", 990, 3350, 80, 50),
        _row("H200", 990, 4800, 141, 50),
        GH200,
        _row("B200", 2250, 8000, 180, 50),
        replace(_row("GB200", 2500, 8000, 186, 225), both_links_bytes_per_s=256 * GB),
        replace(_row("GB300", 2500, 8000, 288, 225), both_links_bytes_per_s=256 * GB),
        _row("MI300X", 1307, 5300, 192, 50),
    )
)
"""Devices. ``"H100-SXM"`` and ``"h100"`` are other spellings of ``"H100"``; others likewise.

Links are PCIe unless a row says otherwise: generation 4 for A100, 5 for others.
"""
