"""Time and memory of a step now, at first, and without offload: rows of a table, and in the log.

gain = Gain(time, bounds.first, groups_sum(step.summary.values()), room.figures)
log_gain(gain)
gain_table({"rank 0": gain})
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pp_offload._common.processes import logger_of
from pp_offload._common.tables import format_table
from pp_offload._groups.plan import GroupBytes

logger = logger_of(__name__)

MIB, GIB = 2**20, 2**30

FREE_PART = 0.01
"""Part of a step up to which waiting for copies is no reason for a warning."""

FREES_NOTHING = "copies free no memory here, where the device is the host"

TABLE_TITLE = (
    "a step and the device's peak: now, in the first step, and without offload (~: estimated);\n"
    "saved tensors at the peak: kept on the device, copied, computed again"
)


class StepTime(NamedTuple):
    """Time of a step, in milliseconds."""

    step_ms: float = 0.0
    """Time until the next step, by the device's clock, else by the host's; 0 if not timed."""

    waiting_ms: float = 0.0
    """Time that compute waited for copies."""

    has_waits: bool = False
    """Whether waits were timed."""


class DeviceFigures(NamedTuple):
    """Memory of the device, in bytes."""

    peak_bytes: int
    """Peak of the last step; without a limit, the peak that the device reports."""

    first_peak_bytes: int = 0
    """Peak of the first step; 0 if not measured."""


class Gain(NamedTuple):
    """Cost and gain of offload in a step."""

    now: StepTime
    first: StepTime
    groups: GroupBytes
    """Bytes of all groups of the microbatches in flight at the peak."""

    device: DeviceFigures | None
    """Memory of the device; None if the device does not report it."""

    copies_free: bool = True
    """Whether copies free memory of the device: not where that is the host."""

    @property
    def spared_bytes(self) -> int:
        """Bytes that offload keeps off the device at the peak: an estimate, as copies may be in
        flight there.
        """
        return self.groups.again + (self.groups.copied if self.copies_free else 0)

    @property
    def unit(self) -> tuple[str, int]:
        """Unit in which these figures are not all near 0, and its bytes."""
        peak_bytes = 0 if self.device is None else self.device.peak_bytes
        is_small = max(self.groups.saved, self.spared_bytes, peak_bytes) < GIB / 10
        return ("MiB", MIB) if is_small else ("GiB", GIB)


def gain_table(gains: Mapping[str, Gain | None]) -> str:
    """Format a row for each rank by its label; empty before a rank has measured a step."""
    ranks = {label: gain for label, gain in gains.items() if gain is not None}
    if not ranks:
        return ""
    unit, size = max([gain.unit for gain in ranks.values()], key=lambda unit: unit[1])
    rows = [(label, *_cells(gain, size)) for label, gain in ranks.items()]
    columns = ("step ms", "first", "without", f"peak {unit}", "first", "without")
    table = format_table([("", *columns, "kept", "copied", "again"), *rows])
    note = "" if all(gain.copies_free for gain in ranks.values()) else f"\n{FREES_NOTHING}"
    return f"{TABLE_TITLE}\n{table}{note}"


def log_gain(gain: Gain) -> None:
    """Log the table of this rank: a warning if copies cost time."""
    table = gain_table({"this rank": gain})
    if gain.now.waiting_ms <= FREE_PART * gain.now.step_ms:
        logger.info("%s", table)
        return
    logger.warning(
        "%s\ncompute waits %.1f ms of a step for copies; more device memory, fewer groups, or "
        "recomputed layers (pp-offload plan) would wait less",
        table,
        gain.now.waiting_ms,
    )


def _cells(gain: Gain, size: int) -> list[str]:
    now, device, groups = gain.now, gain.device or DeviceFigures(0), gain.groups
    is_offloading = groups.copied + groups.again > 0
    without_ms = now.step_ms - now.waiting_ms if now.has_waits or not is_offloading else 0.0
    without_bytes = device.peak_bytes and device.peak_bytes + gain.spared_bytes
    mark = "~" if is_offloading else ""
    if not device.peak_bytes and is_offloading:
        without = f"~+{gain.spared_bytes / size:.2f}"
    else:
        without = _or_dash(without_bytes / size, 2, mark)
    return [
        _or_dash(now.step_ms, 1),
        _or_dash(gain.first.step_ms, 1),
        _or_dash(without_ms, 1, mark),
        _or_dash(device.peak_bytes / size, 2),
        _or_dash(device.first_peak_bytes / size, 2),
        without,
        *(f"{nbytes / size:.2f}" for nbytes in (groups.kept, groups.copied, groups.again)),
    ]


def _or_dash(number: float, digits: int, mark: str = "") -> str:
    return f"{mark}{number:.{digits}f}" if number else "-"
