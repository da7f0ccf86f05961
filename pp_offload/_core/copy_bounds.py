"""A bound in bytes, which an option sets or the engine chooses.

bound = Bound(config.prefetch_bytes, least=2**18)
bound.expect(nbytes)        # at least twice the largest group, until
bound.choose(700 * 2**20)   # the engine has measured a better one
bound.nbytes
"""

from __future__ import annotations

from pp_offload.config import AUTO

IN_FLIGHT_BYTES = 2**29
"""Default bound on bytes in flight to the host."""

SMALL_BYTES = 2**18
"""Smaller reloads of several groups are queued as one batch."""

REFILL_BYTES = 2**22
"""A reload of fewer bytes costs the host more time than the link, at 50 GB/s."""


class Bound:
    """A bound on bytes in flight in one direction: ``given``, or first ``least`` with AUTO."""

    def __init__(self, given: int | str, least: int) -> None:
        self.nbytes = given if isinstance(given, int) else least
        self._is_auto = self._follows_groups = given == AUTO

    def expect(self, group_bytes: int) -> None:
        """Raise the bound to at least twice ``group_bytes``, until :meth:`choose` was called."""
        if self._follows_groups:
            self.nbytes = max(self.nbytes, 2 * group_bytes)

    def choose(self, nbytes: int) -> None:
        """Set the bound, unless the option fixed it."""
        if self._is_auto:
            self._follows_groups = False
            self.nbytes = nbytes


def refill_below(window_bytes: int) -> int:
    """Return the unused bytes at which a window is refilled.

    Early, so that copies never pause, but not after each small tensor.
    """
    return window_bytes - max(window_bytes // 8, min(window_bytes // 2, REFILL_BYTES))
