"""Figures of offload for loggers: what was done since they were asked for last.

    figures = Figures(offload.statistics)
    train_a_step()
    logger.log(figures.since_last())

A logger shows each of these over time, so they are few: the others are in the statistics.
"""

from __future__ import annotations

from collections.abc import Callable

from pp_offload._core.statistics import OffloadStatistics

PREFIX = "offload/"
LOGGED = ("bytes_offloaded", "bytes_reloaded", "host_bytes_peak", "on_demand_reloads", "stalled_ms")
LOGGED_OF_DISK = ("disk_bytes_written", "disk_bytes_read", "disk_bytes_peak")
"""Fields of :class:`OffloadStatistics` that are logged; those of a disk where it was used."""


class Figures:
    """Of one engine, whose ``statistics`` they are made of.

    Args:
        statistics: Called now, and whenever figures are wanted.
    """

    def __init__(self, statistics: Callable[[], OffloadStatistics]) -> None:
        self._statistics = statistics
        self._last = statistics()

    def since_last(self) -> dict[str, int | float]:
        """By name, such as ``offload/bytes_offloaded``; a peak is the most there ever was."""
        before, self._last = self._last, self._statistics()
        found = self._last.since(before).as_dict()
        names = LOGGED + (LOGGED_OF_DISK if self._last.disk_bytes_peak else ())
        return {PREFIX + name: found[name] for name in names if name in found}
