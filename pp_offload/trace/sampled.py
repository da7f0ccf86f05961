"""What the counters of a trace say at one time."""

from __future__ import annotations

from pp_offload._groups.offloader import Offloader
from pp_offload.trace.events import DEVICE, HOST, IN_FLIGHT, RELOADED


class Counters:
    """Reads counters; nothing is let go of or waited for, as ``statistics()`` would.

    Args:
        offloader: Whose engine it is.
    """

    def __init__(self, offloader: Offloader) -> None:
        self._offloader = offloader
        self._is_told = offloader.backend.allocated() is not None
        self._least_peak = 0

    def read(self) -> dict[str, int]:
        """Bytes by counter, as the host knows them now. Takes the lock for a moment."""
        mover = self._offloader.engine.mover
        with mover.lock:
            found = {
                HOST: sum([pool.in_use_bytes for pool in mover.tier.pools]),
                IN_FLIGHT: mover.in_flight.nbytes,
                RELOADED: mover.arrived.unused_bytes,
            }
        allocated = self._offloader.backend.allocated() if self._is_told else None
        if allocated is not None:
            found[DEVICE] = allocated.nbytes
            self._least_peak = min(self._least_peak, allocated.peak_bytes)
        return found

    def step_peak(self) -> int | None:
        """The most that was allocated since this was last called; None where nobody knows.

        A device tells its peak since that was last reset, which others do. It is this step's where
        it has risen since any of the times at which counters were read.
        """
        allocated = self._offloader.backend.allocated() if self._is_told else None
        if allocated is None:
            return None
        least, self._least_peak = self._least_peak, allocated.peak_bytes
        return self._least_peak if self._least_peak > least else None
