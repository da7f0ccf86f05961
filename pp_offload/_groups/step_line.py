"""Logs in one line what steps cost, once what stays has been chosen.

log_step(time, step.summary.values(), room.figures)
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple

from pp_offload._common.processes import logger_of
from pp_offload._groups.plan import GroupBytes

logger = logger_of(__name__)

GIB = 2**30

FREE_PART = 0.01
"""Waiting for copies in a smaller part of a step is not worth a warning."""


class StepTime(NamedTuple):
    """Of a step, in milliseconds."""

    step_ms: float
    """Until its last copy; 0 without any, or if the step was not timed."""

    waiting_ms: float
    """While compute waited for copies."""


class DeviceFigures(NamedTuple):
    """Memory of the device, in bytes."""

    limit_bytes: int
    peak_bytes: int
    """Of the last step."""

    elsewhere: str = ""
    """Cause of the device's peak, if that peak is not in a group; may be empty."""

    is_given: bool = True
    """Whether the limit is a number that the user gave."""


NOT_TIMED = StepTime(0.0, 0.0)


def log_step(time: StepTime, groups: Iterable[GroupBytes], device: DeviceFigures | None) -> None:
    """Log what :func:`step_line` says of the sum of these groups."""
    total = GroupBytes()
    for each in groups:
        total = total.plus(each)
    level, line = step_line(time, total, device)
    logger.log(level, "%s", line)


def step_line(time: StepTime, groups: GroupBytes, device: DeviceFigures | None) -> tuple[int, str]:
    """A warning if copies cost time, else information.

    Args:
        time: Of a step.
        groups: What became of the bytes of its groups.
        device: Memory it took; None without a limit.

    Returns:
        The level, and the line without the rank.
    """
    stay, sent, again = (f"{n / GIB:.2f}" for n in (groups.kept, groups.copied, groups.again))
    line = (
        f"at the peak, {stay} GiB of saved tensors stay on the device, {sent} are on the host, "
        f"and {again} are computed again"
    )
    if time.step_ms:
        without_ms = time.step_ms - time.waiting_ms
        line += f"; a step takes {time.step_ms:.1f} ms, {without_ms:.1f} without waiting for copies"
    if device is not None:
        peak, limit = device.peak_bytes / GIB, device.limit_bytes / GIB
        line += f"; the device's peak is about {peak:.2f} GiB of at most {limit:.2f}"
        if device.elsewhere:
            line += f"; {device.elsewhere}"
    if time.waiting_ms <= FREE_PART * time.step_ms:
        return logging.INFO, line
    more = "a device_limit_bytes, " if device is None else "a larger device_limit_bytes, "
    if device is not None and not device.is_given:
        more = ""  # the device has no more
    return logging.WARNING, (
        f"{line}; {more}fewer groups, or recomputed layers (pp-offload plan) would wait less"
    )
