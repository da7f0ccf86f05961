"""The manager of this process: with other options, or for a while on another backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pp_offload._megatron.manager import PipelineOffloadManager
from pp_offload.backends import Backend, check_backend
from pp_offload.config import OffloadConfig


def configure(config: OffloadConfig) -> PipelineOffloadManager:
    """Give the manager of this process these options, between steps.

    What was marked with ``mark_not_offloadable`` stays marked, and offload disabled if it was; the
    plan, the summary and the statistics begin anew. Saved tensors that still live stay good.

    Args:
        config: If these are the present options, nothing happens.

    Returns:
        The manager, the same as before: what :meth:`PipelineOffloadManager.get_instance` returns.

    Raises:
        OffloadError: A schedule is attached with other options.
        TypeError: ``config`` is no :class:`OffloadConfig`.
    """
    manager = PipelineOffloadManager.get_instance()
    manager.configure(config)
    return manager


@contextmanager
def use_backend(
    backend: Backend, *, config: OffloadConfig | None = None
) -> Iterator[PipelineOffloadManager]:
    """Work on ``backend`` with a manager of its own; afterwards the old one is back.

    Args:
        backend: For instance ``SimulatedBackend("late")`` or ``CpuBackend()``.
        config: Options of the fresh manager.

    Yields:
        The fresh manager, which :meth:`PipelineOffloadManager.get_instance` now returns, also after
        :func:`configure`.

    Raises:
        TypeError: ``backend`` is no backend, or ``config`` no :class:`OffloadConfig`.
    """
    check_backend(backend)
    manager = PipelineOffloadManager(config=config, backend=backend)
    try:
        with use_manager(manager):
            yield manager
    finally:
        manager.retire()


@contextmanager
def use_manager(manager: PipelineOffloadManager) -> Iterator[None]:
    """Work with a manager that is not retired, on its backend; afterwards the old one is back."""
    before = PipelineOffloadManager.OFFLOAD_MGR
    PipelineOffloadManager.OFFLOAD_MGR = manager
    try:
        with manager.backend.activate():
            yield
    finally:
        PipelineOffloadManager.OFFLOAD_MGR = before
