"""The manager of the process, under Megatron's names.

manager = PipelineOffloadManager.get_instance()
manager.init_model_chunk_offload_handler(vp_size, vp_stage)   # before each microbatch's forward
with manager: ...                                             # tensors saved join open groups
manager.reset()                                               # before each step
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from pp_offload._common.checks import check_kind, checked_tensors
from pp_offload._common.torch_private import never_compiled
from pp_offload._core.saved import Packed, Resident
from pp_offload._groups.manager import Manager
from pp_offload._groups.plan import GroupBytes
from pp_offload._hooks import (
    HookScope,
    HookScopes,
    PackHook,
    exact_exit,
    is_in_backward,
    is_left_to_checkpoint,
    unpack,
)
from pp_offload._megatron.chunk import ChunkOffloadHandler
from pp_offload._memory.pool import GPUTensorPool
from pp_offload.backends import Backend, Stream, check_backend
from pp_offload.config import OffloadConfig


class PipelineOffloadManager(Manager):
    """Coordinates the chunks of one process: the microbatches, each on one part of the model.
    :meth:`get_instance` returns the manager of the process.

    Args:
        config: Options; defaults when None.
        backend: Device to work on; the accelerator if present, else the CPU.

    Attributes:
        graph_stream, graph_event: Of CUDA graphs; made when Megatron-LM's main asks for them.

    Source: Megatron-LM ``PipelineOffloadManager``.
    """

    OFFLOAD_MGR: ClassVar[PipelineOffloadManager | None] = None
    INHERITED: ClassVar[PipelineOffloadManager | None] = None  # in a fork: see :func:`_after_fork`

    def __init__(
        self, *, config: OffloadConfig | None = None, backend: Backend | None = None
    ) -> None:
        super().__init__(config=config, backend=backend)
        self._scopes = HookScopes()
        self._pool: GPUTensorPool | None = None
        self.graph_stream: Any = None
        self.graph_event: Any = None

    @classmethod
    def get_instance(cls) -> PipelineOffloadManager:
        """Return the manager of this process, which the first call makes."""
        if cls.OFFLOAD_MGR is None:
            old = cls.INHERITED
            cls.OFFLOAD_MGR = cls() if old is None else cls(config=old.config, backend=old.backend)
            if old is not None:
                cls.OFFLOAD_MGR.take_over(old)
        return cls.OFFLOAD_MGR

    @classmethod
    def reset_instance(cls) -> None:
        """Drop the manager and its idle host memory; the next ``get_instance`` makes a new one.

        Graphs that still hold tensors saved by the old manager stay valid.
        """
        old, PipelineOffloadManager.OFFLOAD_MGR = PipelineOffloadManager.OFFLOAD_MGR, None
        if old is not None:
            old.retire()

    @property
    def d2h_stream(self) -> Stream:
        return self.backend.d2h

    @property
    def h2d_stream(self) -> Stream:
        return self.backend.h2d

    @property
    def cpu_tensor_pool(self) -> GPUTensorPool:
        """Pool of host tensors for callers; the engine's own bytes are in its host tier."""
        if self._pool is None:
            self._pool = GPUTensorPool("cpu", pin_memory=self.backend.device.type != "cpu")
        return self._pool

    # Chunks

    make_chunk = staticmethod(partial(ChunkOffloadHandler, cpu_tensor_pool=None))
    init_model_chunk_offload_handler = Manager.begin_chunk  # Megatron's name

    def cur_forward_chunk(self) -> ChunkOffloadHandler | None:
        """Return the chunk whose forward runs on this thread."""
        return _handler(self.forward.chunk)

    def pop_forward_chunk(self, name: str | None = None) -> ChunkOffloadHandler | None:
        """Return :meth:`cur_forward_chunk` for any ``name``."""
        return self.cur_forward_chunk()

    def cur_backward_chunk(self) -> ChunkOffloadHandler | None:
        """Return the chunk that backward reached last."""
        return _handler(self.step.in_backward)

    def push(self, handler: ChunkOffloadHandler) -> None:
        """Add a chunk to the backward queue."""
        self.step.queue.push(handler)

    def flush(self) -> None:
        """Do nothing: chunks are in the backward queue from the start, last virtual stage first."""

    def pop_backward_chunk(self, name: str | None = None) -> ChunkOffloadHandler | None:
        """Take the next chunk with groups (of that name) out of the backward queue."""
        return _handler(self.step.queue.pop(name))

    def front_backward_chunk(self, name: str | None = None) -> ChunkOffloadHandler | None:
        """Return the next chunk with groups (of that name); it stays queued."""
        return _handler(self.step.queue.front(name))

    @property
    def offload_summary_bytes(self) -> dict[str, int]:
        """Bytes copied to the host per group name, by the chunks live at the peak of the last
        complete step; empty before the first complete step.
        """
        return {name: each.copied for name, each in self.step.summary.items() if each.copied}

    @property
    def group_bytes(self) -> dict[str, GroupBytes]:
        """Saved bytes of each group name: kept, copied and computed again, of the same chunks."""
        return dict(self.step.summary)

    @property
    def offload_summary_total_bytes(self) -> int:
        return sum(self.offload_summary_bytes.values())

    # Steps

    def post_warmup_callback(self) -> None:
        """Derive the plan, and :attr:`offload_summary_bytes`, from the first complete step."""
        self.learn()

    def release_idle_memory(self) -> None:
        """Return host memory that no saved tensor needs to the system; waits for copies."""
        self.offloader.trim()
        self.offloader.engine.mover.tier.pool.has_asked = False  # another phase begins

    # Switches

    def disable_offload(self) -> None:
        """Offload no group from now on, until :meth:`enable_offload`.

        A group that starts meanwhile saves through plain autograd; its commit does nothing.
        Inside this manager's context tensors still pass through a hook, because offload may be
        enabled before the context ends.
        """
        self.offloader.engine.is_enabled = False
        self.idle_groups.was_disabled = True

    def enable_offload(self) -> None:
        self.offloader.engine.is_enabled = True

    def mark_not_offloadable(self, tensor: Tensor) -> None:
        """Keep ``tensor`` and every view of it on the device, as long as its storage lives."""
        check_kind("tensor", tensor, Tensor, "a tensor", "mark each tensor on its own")
        self.offloader.engine.eligibility.residents.add(tensor)

    # Delayed groups

    def push_offload_groups(
        self,
        group_hook: Callable[[Sequence[Tensor] | None], None],
        forced_released_tensors: Sequence[Tensor] | None,
    ) -> None:
        """Queue a commit for :meth:`flush_delayed_groups`. The queue keeps no tensor alive."""
        tensors = checked_tensors("forced_released_tensors", forced_released_tensors)
        self.offloader.delay(group_hook, tensors)

    def flush_delayed_groups(self) -> None:
        """Run the queued commits, in forward order."""
        self.offloader.commit_delayed()

    # Hooks

    def __enter__(self) -> Any:
        """Save tensors through the engine until :meth:`__exit__`; may be nested.

        Inside a checkpoint it does nothing.
        """
        self._scopes.enter(HookScope(), self._begin)
        return self

    def _begin(self, scope: HookScope) -> None:
        if not is_left_to_checkpoint():
            scope.enter(PackHook(self.on_save_for_backward), self)

    @exact_exit
    def __exit__(self, *args: Any) -> None:
        """Leave the innermost scope of this thread. An exception propagates."""
        self._scopes.leave(*args[1:2])
        chunk = self.forward.chunk
        if args and args[0] is not None and chunk is not None and (groups := chunk.uncommitted()):
            groups[-1].has_failed = True

    @never_compiled
    def on_save_for_backward(self, tensor: Tensor) -> Packed:
        """Save ``tensor`` (pack hook), and return a tag that is bound to the group open now."""
        chunk = self.forward.chunk
        if chunk is None or not chunk.open_groups or is_in_backward():
            return Resident(tensor)  # in backward, a recomputation belongs to another chunk
        return chunk.open_groups[-1].pack(tensor)

    def on_get_saved_tensor(self, saved_state: Packed) -> Tensor:
        """Return a saved tensor (unpack hook). May be called repeatedly, in any order."""
        return unpack(saved_state)


def _handler(chunk: object) -> ChunkOffloadHandler | None:
    """Return ``chunk``; None for the weight pass of a split backward, not of Megatron."""
    return chunk if isinstance(chunk, ChunkOffloadHandler) else None


def _after_fork() -> None:
    """Have a forked process make its own manager, with the parent's options, at first use.

    The parent's manager copies by threads that do not exist here, so its saved tensors raise
    :class:`~pp_offload.errors.ForkedError`. It stays alive: its destructors would wait for copies.
    """
    cls = PipelineOffloadManager
    cls.INHERITED, cls.OFFLOAD_MGR = cls.OFFLOAD_MGR or cls.INHERITED, None


os.register_at_fork(after_in_child=_after_fork)


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
        if not sys.is_finalizing():  # a context that was never left: modules are gone
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
