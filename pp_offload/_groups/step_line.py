"""Time and memory of a step now, at first, and without offload: a log line and table rows.

gain = room.gain(bounds.last, bounds.first)
log_gain(gain)
gain_table({"rank 0": gain})
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

from pp_offload._common.processes import logger_of
from pp_offload._common.text import GIB, MIB, format_table
from pp_offload._groups.plan import GroupBytes

logger = logger_of(__name__)

FREE_PART = 0.01  # of a step, up to which waiting for copies is no reason for a warning
FREES_NOTHING = "copies free no memory here, where the device is the host"
TABLE_TITLE = (
    "a step and the device's peak: now, in the first step, and without offload (~: estimated);\n"
    "saved tensors at the peak: kept on the device, copied, computed again"
)


class StepTime(NamedTuple):
    """Time of a step until the next, by the device's clock, else by the host's, in milliseconds; 0
    if not timed. Compute waited for copies for ``waiting_ms``, if it ``has_waits`` that were timed.
    """

    step_ms: float = 0.0
    waiting_ms: float = 0.0
    has_waits: bool = False


class DeviceFigures(NamedTuple):
    """Memory of the device, in bytes."""

    peak_bytes: int  # of the last step
    first_peak_bytes: int = 0  # of the first step; 0 if not measured
    limit_bytes: int | None = None
    elsewhere: str = ""  # cause of the device's peak, if that is not in a group; may be empty
    is_given: bool = True  # whether the limit is a number that the user gave


class Gain(NamedTuple):
    """Cost and gain of offload in a step."""

    now: StepTime
    first: StepTime
    groups: GroupBytes  # of all groups of the microbatches in flight at the peak
    device: DeviceFigures | None  # None if the device does not report its memory
    copies_free: bool = True  # whether copies free memory of the device: not where that is the host

    @property
    def spared_bytes(self) -> int:
        """Bytes that are off the device at its peak: estimated, as copies may be in flight."""
        return self.groups.again + (self.groups.copied if self.copies_free else 0)

    @property
    def unit(self) -> tuple[str, int]:
        """Unit in which these figures are not all near 0, and its bytes."""
        peak_bytes = 0 if self.device is None else self.device.peak_bytes
        is_small = max(self.groups.saved, self.spared_bytes, peak_bytes) < GIB / 10
        return ("MiB", MIB) if is_small else ("GiB", GIB)


def log_gain(gain: Gain) -> None:
    """Log :func:`step_line`."""
    level, line = step_line(gain)
    logger.log(level, "%s", line)


def step_line(gain: Gain) -> tuple[int, str]:
    """Level and text of the log line, without the rank: a warning if copies cost time."""
    now, groups, device = gain.now, gain.groups, gain.device
    unit, size = gain.unit
    staying, copied, again = (n / size for n in (groups.staying, groups.copied, groups.again))
    line = (
        f"at the peak, {staying:.2f} {unit} of saved tensors stay on the device, {copied:.2f} are "
        f"on the host, and {again:.2f} are computed again"
    )
    if now.step_ms:
        line += f"; a step takes {now.step_ms:.1f} ms"
        if now.has_waits:
            line += f", {now.step_ms - now.waiting_ms:.1f} without waiting for copies (estimated)"
        if gain.first.step_ms:
            line += f", and took {gain.first.step_ms:.1f} as the first"
    if device is None:
        spared = gain.spared_bytes / size
        line += f"; without offload the peak is up to {spared:.2f} {unit} higher (estimated)"
    else:
        line += f"; the device's peak is about {device.peak_bytes / size:.2f} {unit}"
        if device.limit_bytes is not None:
            line += f" of at most {device.limit_bytes / size:.2f}"
        if device.first_peak_bytes:
            line += f", was {device.first_peak_bytes / size:.2f} in the first step"
        without = (device.peak_bytes + gain.spared_bytes) / size
        line += f", and up to {without:.2f} without offload (estimated)"
        if device.elsewhere:
            line += f"; {device.elsewhere}"
    if not gain.copies_free:
        line += f"; {FREES_NOTHING}"
    if now.waiting_ms <= FREE_PART * now.step_ms:
        return logging.INFO, line
    limit = "a device_limit_bytes, "
    if device is not None and device.limit_bytes is not None:
        limit = "a larger device_limit_bytes, " if device.is_given else ""  # the device has no more
    return logging.WARNING, (
        f"{line}; {limit}fewer groups, or recomputed layers (pp-offload plan) would wait less"
    )


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


def _cells(gain: Gain, size: int) -> list[str]:
    now, device, groups = gain.now, gain.device or DeviceFigures(0), gain.groups
    is_offloading = groups.copied + groups.again > 0
    without_ms = now.step_ms - now.waiting_ms if now.has_waits or not is_offloading else 0.0
    without_bytes = device.peak_bytes and device.peak_bytes + gain.spared_bytes
    mark = "~" if is_offloading else ""
    without = _or_dash(without_bytes / size, 2, mark)
    if not device.peak_bytes and is_offloading:
        without = f"~+{gain.spared_bytes / size:.2f}"
    return [
        _or_dash(now.step_ms, 1),
        _or_dash(gain.first.step_ms, 1),
        _or_dash(without_ms, 1, mark),
        _or_dash(device.peak_bytes / size, 2),
        _or_dash(device.first_peak_bytes / size, 2),
        without,
        *(f"{nbytes / size:.2f}" for nbytes in (groups.staying, groups.copied, groups.again)),
    ]


def _or_dash(number: float, digits: int, mark: str = "") -> str:
    return f"{mark}{number:.{digits}f}" if number else "-"
