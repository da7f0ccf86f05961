"""Figures of offload for loggers: bytes moved since the last call.

figures = Figures(offload.statistics)
train_a_step()
logger.log(figures.since_last())
"""

from __future__ import annotations

from collections.abc import Callable

from pp_offload._core.statistics import OffloadStatistics

LOGGED = (
    *("bytes_offloaded", "bytes_reloaded", "bytes_computed_again", "host_bytes_peak"),
    *("on_demand_reloads", "step_ms", "stalled_ms"),
)
LOGGED_OF_DISK = ("disk_bytes_written", "disk_bytes_read", "disk_bytes_peak")
"""Logged fields of :class:`OffloadStatistics`; disk fields only if a disk was used."""


class Figures:
    """Figures of an engine, from its ``statistics``."""

    def __init__(self, statistics: Callable[[], OffloadStatistics]) -> None:
        self._statistics, self._last = statistics, statistics()

    def since_last(self) -> dict[str, int | float]:
        """Return figures by name, such as ``offload/bytes_offloaded``; peaks are of all steps."""
        before, self._last = self._last, self._statistics()
        values = self._last.since(before).as_dict()
        names = LOGGED + (LOGGED_OF_DISK if self._last.disk_bytes_peak else ())
        return {f"offload/{name}": values[name] for name in names if name in values}
