"""Options of this process's manager, and managers on another backend for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pp_offload._megatron.manager import PipelineOffloadManager
from pp_offload.backends import Backend, check_backend
from pp_offload.config import OffloadConfig


def configure(config: OffloadConfig) -> PipelineOffloadManager:
    """Set the options of this process's manager, between steps.

    Tensors marked with ``mark_not_offloadable`` stay marked, and a disabled offload stays disabled;
    the plan, the summary and the statistics begin anew. Living saved tensors stay valid.

    Args:
        config: New options; the current ones change nothing.

    Returns:
        The manager, the same as before, as :meth:`PipelineOffloadManager.get_instance` returns it.

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
    """Work on ``backend`` with a fresh manager, and restore the old one afterwards.

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
    """Work with a manager on its backend, and restore the old one afterwards. Retires neither."""
    before = PipelineOffloadManager.OFFLOAD_MGR
    PipelineOffloadManager.OFFLOAD_MGR = manager
    try:
        with manager.backend.activate():
            yield
    finally:
        PipelineOffloadManager.OFFLOAD_MGR = before
