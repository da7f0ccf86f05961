"""A backend and a fresh manager for the length of a ``with``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pp_offload.backends import Backend
from pp_offload.config import OffloadConfig
from pp_offload.manager import PipelineOffloadManager


@contextmanager
def use_backend(
    backend: Backend, *, config: OffloadConfig | None = None
) -> Iterator[PipelineOffloadManager]:
    """Work on ``backend`` with a manager of its own; afterwards the old one is back.

    Args:
        backend: For instance ``SimulatedBackend("late")`` or ``CpuBackend()``.
        config: Options of the fresh manager.

    Yields:
        The fresh manager, which :meth:`PipelineOffloadManager.get_instance` now returns.
    """
    before = PipelineOffloadManager.OFFLOAD_MGR
    manager = PipelineOffloadManager(config=config, backend=backend)
    PipelineOffloadManager.OFFLOAD_MGR = manager
    try:
        with backend.activate():
            yield manager
    finally:
        PipelineOffloadManager.OFFLOAD_MGR = before
        manager.release_idle_memory()
