"""Figures of offload for loggers: bytes that were moved since the last call.

figures = Figures(offload.statistics)
train_a_step()
logger.log(figures.since_last())
"""

from __future__ import annotations

from collections.abc import Callable

from pp_offload._core.statistics import OffloadStatistics

LOGGED = ("bytes_offloaded", "bytes_reloaded", "host_bytes_peak", "on_demand_reloads", "stalled_ms")
LOGGED_OF_DISK = ("disk_bytes_written", "disk_bytes_read", "disk_bytes_peak")
"""Logged fields of :class:`OffloadStatistics`; those of a disk only where it was used."""


class Figures:
    """Figures of an engine, made of its ``statistics``."""

    def __init__(self, statistics: Callable[[], OffloadStatistics]) -> None:
        self._statistics, self._last = statistics, statistics()

    def since_last(self) -> dict[str, int | float]:
        """Figures by name, such as ``offload/bytes_offloaded``; a peak is that of the whole run."""
        before, self._last = self._last, self._statistics()
        values = self._last.since(before).as_dict()
        names = LOGGED + (LOGGED_OF_DISK if self._last.disk_bytes_peak else ())
        return {f"offload/{name}": values[name] for name in names if name in values}
