"""The manager of this process: with other options, or for a while on another backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pp_offload.backends import Backend, check_backend
from pp_offload.config import OffloadConfig, check_config
from pp_offload.errors import OffloadError
from pp_offload.manager import PipelineOffloadManager


def configure(config: OffloadConfig) -> PipelineOffloadManager:
    """Give the manager of this process these options, between steps.

    What was marked with ``mark_not_offloadable`` stays marked, and offload disabled if it was; the
    plan and the summary begin anew. Saved tensors that still live stay good.

    Args:
        config: If they differ from those there are, a new manager takes the place of the old one.

    Returns:
        What :meth:`PipelineOffloadManager.get_instance` now returns.

    Raises:
        OffloadError: A schedule is attached with other options.
        TypeError: ``config`` is no :class:`OffloadConfig`.
    """
    check_config(config)
    old = PipelineOffloadManager.get_instance()
    manager = successor(old, config)
    PipelineOffloadManager.OFFLOAD_MGR = manager
    if manager is not old:
        old.retire()
    return manager


def successor(old: PipelineOffloadManager, config: OffloadConfig) -> PipelineOffloadManager:
    """A manager with these options, to take the place of ``old``; itself if it has them.

    Raises:
        OffloadError: A schedule is attached with other options.
    """
    if config == old.config:
        return old
    if old.num_attached:
        raise OffloadError(
            f"a schedule is attached with {old.config}, expected the same and not {config}; "
            "detach() it first, or give both the same config"
        )
    manager = PipelineOffloadManager(config=config, backend=old.backend)
    manager.take_over(old)
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
        The fresh manager, which :meth:`PipelineOffloadManager.get_instance` now returns.

    Raises:
        TypeError: ``backend`` is no backend, or ``config`` no :class:`OffloadConfig`.
    """
    check_backend(backend)
    before = PipelineOffloadManager.OFFLOAD_MGR
    manager = PipelineOffloadManager(config=config, backend=backend)
    PipelineOffloadManager.OFFLOAD_MGR = manager
    try:
        with backend.activate():
            yield manager
    finally:
        PipelineOffloadManager.OFFLOAD_MGR = before
        manager.retire()
