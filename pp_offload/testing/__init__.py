"""Simulated device for tests of the engine and its users; copies run as late as permitted.

with use_backend(SimulatedBackend("late")) as manager:
    ...  # a missing wait reads poison, or raises RaceError
"""

from __future__ import annotations

from pp_offload._megatron.manager import use_backend
from pp_offload.testing.simulated import SimulatedBackend

__all__ = ["SimulatedBackend", "use_backend"]
