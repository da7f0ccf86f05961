"""For tests of the engine, and of code that uses it: a device that is as late as it may be.

with use_backend(SimulatedBackend("late")) as manager:
    ...  # a missing wait reads poison, or raises RaceError
"""

from __future__ import annotations

from pp_offload.backends.simulated import SimulatedBackend
from pp_offload.session import use_backend

__all__ = ["SimulatedBackend", "use_backend"]
