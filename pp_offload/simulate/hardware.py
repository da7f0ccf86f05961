"""What is known of accelerators: how fast they compute, read their memory, and are copied from.

The rates are those of NVIDIA's and AMD's data sheets, for dense bf16. What programs reach of them
is a fraction, which differs by program: measure it, and replace it.

    h100 = replace(DEVICES["H100"], matmul_fraction=0.7)
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from pp_offload._common.checks import said

GB = 10**9


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One accelerator and its link to the host.

    Raises:
        ValueError: A rate is not above 0, a time is below, or a fraction is above 1.
    """

    name: str

    matmul_flops: float
    """Peak of dense bf16 matrix products, in floating point operations a second."""

    memory_bytes_per_s: float
    """Peak of the device's own memory."""

    memory_bytes: int
    """How much of it there is."""

    link_bytes_per_s: float
    """To the host, and as much from there at the same time, from pinned memory."""

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
            if one.name == "name":
                continue
            value = getattr(self, one.name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            is_time = one.name in ("launch_s", "copy_latency_s")
            if not is_number or not (value > 0 or (is_time and value == 0)):
                least = "at least 0" if is_time else "above 0"
                raise ValueError(f"{one.name} is {said(value)}, expected a number {least}")
            if one.name.endswith("_fraction") and value > 1:
                raise ValueError(f"{one.name} is {said(value)}, expected at most 1")


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
