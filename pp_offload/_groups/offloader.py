"""State that the chunks of a manager, or of a stash, share: the engine, the step, and the plan.

NOTE [ Epochs ]
    An exception that passes through the engine's own code may have interrupted two lines that
    belong together. So it ends the engine's epoch: the next step, forward or context begins with a
    fresh engine. Living graphs keep the old engine, to whose tensors and events they refer. The old
    engine ends between two steps, once these graphs are gone: in garbage collection, or when
    autograd frees a node, its destructors would swallow an exception of a signal handler.

NOTE [ Forced release ]
    A user names tensors whose memory the forward still references but no longer needs. Once its
    bytes are on the host, a storage is emptied, but only if nothing else can share it: a saved
    tensor of another group, a view in the user's hands, or a tensor that autograd saved without
    hooks counts as a holder. Memory that is not torch's own stays as well, with a warning, because
    naming it never helps.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from pp_offload._common.checks import described
from pp_offload._common.processes import logger_of, warn_once
from pp_offload._common.torch_private import use_count
from pp_offload._core.eligibility import StorageSet, is_marked
from pp_offload._core.engine import Engine
from pp_offload._core.group import Group
from pp_offload._core.mover import Mover
from pp_offload._core.observers import Observers
from pp_offload._core.statistics import OffloadStatistics, collect
from pp_offload._core.tiers import make_tier
from pp_offload._core.window import Visit
from pp_offload._groups.plan import Plan
from pp_offload._groups.split_backward import SplitBackward
from pp_offload._memory.addresses import has_storage
from pp_offload._memory.budget import reserved_bytes
from pp_offload._memory.host_pool import Allocate, HostPool
from pp_offload.backends import Backend
from pp_offload.config import OffloadConfig

logger = logger_of(__name__)

_EXTERNAL = "its memory is not torch's own, or shared with other processes; do not name it"

Commit = Callable[[Sequence[Tensor] | None], object]  # of a group; then releases these tensors


class NoStep:
    """``StepRecord`` of a lone chunk: the chunk has no key, and no group has a next one."""

    is_in_replay = False

    def add(self, chunk: Any, split: SplitBackward | None) -> None: ...

    def begin(self, group: Group) -> None: ...

    def after(self, group: Group) -> Iterator[Visit]:
        return iter(())


class Offloader:
    """State that chunks share; ``step`` is their StepRecord, None for a lone chunk."""

    engine_type: ClassVar[type[Engine]] = Engine

    def __init__(
        self,
        backend: Backend,
        config: OffloadConfig,
        step: Any = None,
        allocate: Allocate | None = None,
    ) -> None:
        self.backend, self.config = backend, config
        self.step: Any = step or NoStep()
        self._allocate = allocate or backend.allocate_host
        self.plan = Plan()
        self.observers = Observers()  # of the engines of all epochs
        # Commits in forward order, each with the tensors to release.
        self.delayed: list[tuple[Commit, list[weakref.ref[Tensor]] | None]] = []
        self.split: SplitBackward | None = None  # set while a schedule with two parts is attached
        self._torn: list[Engine] = []  # engines of former epochs that living graphs need
        self.engine = self._fresh_engine()
        _alive.add(self)

    def _fresh_engine(self) -> Engine:
        """Make an engine with memory of its own."""
        tier = make_tier(self.backend, self.config, self._allocate)
        engine = self.engine_type(self.backend, tier, self.step, self.config, self.observers)
        engine.idle_others = partial(_idle_beside, tier.pool)
        return engine

    def renew_if_torn(self) -> None:
        """Begin a new epoch, if an exception passed through the code of the current engine. The
        host waits for all copies: an unknown part of them belongs to the old engine, and may use
        memory that is freed with that engine.
        """
        old = self.engine
        if not old.is_torn or self.backend.is_capturing:
            return
        with suppress(RuntimeError):  # a copy that failed is over
            self.backend.synchronize()
        new = self._fresh_engine()
        new.go_on_as(old)
        new.mover.in_flight.bound, new.window.bound = old.mover.in_flight.bound, old.window.bound
        new.mover.counts, new.mover.in_graphs = old.mover.counts, old.mover.in_graphs
        self._torn.append(old)
        self.engine = new  # last: an interrupt before leaves the old one, which is torn
        del old
        self._end_torn()

    def _end_torn(self) -> None:
        """Free the engines of former epochs that no living graph needs."""
        for engine in tuple(self._torn):
            with engine.mover.lock:
                is_needed = any([back() is not None for back in engine.mover.arrived.backs])
            if not is_needed:
                engine.end()
                self._torn.remove(engine)

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held for bookkeeping: NOTE [ One lock ]."""
        return self.engine.mover.lock

    def follow_parts(self, split: SplitBackward | None) -> None:
        """Expect backwards in two parts from now on; None for backwards in one part."""
        if self.split is not None:
            self.observers.remove(self.split)
        self.split = split
        if split is not None:
            self.observers.add(split)

    @property
    def copies_free(self) -> bool:
        """Whether copies free device memory: not where the device is the host, the only tier."""
        return not self.backend.is_host or self.config.tiers != ("host",)

    def delay(self, commit: Commit, released: Sequence[Tensor] | None) -> None:
        """Queue a commit for :meth:`commit_delayed`. The queue keeps no tensor alive."""
        refs = None if released is None else [weakref.ref(tensor) for tensor in released]
        self.delayed.append((commit, refs))

    def commit_delayed(self) -> None:
        """Run the delayed commits, in forward order, with the tensors to release that live."""
        while self.delayed:
            commit, refs = self.delayed.pop(0)
            commit(None if refs is None else [t for ref in refs if (t := ref()) is not None])

    def release_after_copies(self, tensors: Iterable[Tensor]) -> None:
        """Empty the storages of ``tensors``, once the copies queued so far are over."""
        refs, engine = [weakref.ref(tensor) for tensor in tensors], self.engine
        action = partial(release, refs, engine.eligibility.residents)
        engine.guarded(engine.mover.after_copies, action)

    def resume(self, group: Group | None) -> None:
        """Prefetch for a backward that has reached ``group``; None when the step is over."""
        self.engine.guarded(self.engine.window.resume, group)

    def settle(self) -> None:
        """Free memory that finished copies kept alive, and fit host memory to its peak."""
        self._end_torn()
        if not self.backend.is_capturing:
            self.engine.guarded(self._settle, self.engine.mover)

    def _settle(self, mover: Mover) -> None:
        with mover.lock:
            mover.poll()
            mover.tier.failure = None  # the disk is tried again
            for pool in mover.tier.pools:
                pool.settle()

    def trim(self) -> None:
        """Return host memory to the system that no living graph needs. Waits for all copies."""
        if not self.backend.is_capturing:
            self.engine.guarded(self._trim, self.engine.mover)

    def _trim(self, mover: Mover) -> None:
        with suppress(RuntimeError):  # a copy that failed is over
            mover.synchronize()
        with mover.lock:
            for pool in mover.tier.pools:
                pool.trim()

    def retire(self) -> None:
        """End offload: keep only the memory that living saved tensors need."""
        self.trim()
        with self.lock:
            disk = self.engine.mover.tier.disk
            if disk is not None and not disk.in_use_bytes:
                disk.close()

    def statistics(self) -> OffloadStatistics:
        """Return bytes moved and bytes in use, exact at the call."""
        return self.engine.guarded(collect, self.engine.mover)


_alive: weakref.WeakSet[Offloader] = weakref.WeakSet()
os.register_at_fork(after_in_child=_alive.clear)


def _idle_beside(pool: HostPool) -> list[Offloader]:
    """Return offloaders of this process whose host memory is idle, as ``pool`` has none."""
    return [
        offloader
        for offloader in list(_alive)
        for other in offloader.engine.mover.tier.pools
        if other is not pool and other.is_idle and other.budget.process is pool.budget.process
    ]


def release_host_memory() -> int:
    """Return host memory that no saved tensor needs to the system, pinned memory above all.

    Use this between steps if the program needs host memory elsewhere for a while, such as in an
    inference phase between two phases of training. All managers, contexts and checkpoints of this
    process return idle memory, once their copies are over. The next step allocates, and pins, anew.
    Tensors that living graphs saved stay valid. Parameters of an ``OffloadModel`` or of
    ``offload_layers`` stay in host memory.

    Returns:
        Number of bytes returned.
    """
    before = reserved_bytes()
    for offloader in list(_alive):
        offloader.trim()
    return max(0, before - reserved_bytes())


def release(refs: Sequence[weakref.ref[Tensor]], resident: StorageSet) -> None:
    """Empty the storages of those tensors that are alive and that nothing else needs: see
    NOTE [ Forced release ]. References are weak: a pending copy must not keep tensors alive.
    """
    text = "forced_released_tensors: %s stays on the device: %s"
    for ref in refs:
        tensor = ref()
        if tensor is None:
            continue
        reason = _reason_to_stay(tensor, resident)
        if reason is None:
            tensor.untyped_storage().resize_(0)
        elif reason is _EXTERNAL:
            warn_once(logger, resident, text, described(tensor), reason)
        else:
            logger.info(text, described(tensor), reason)


def _reason_to_stay(tensor: Tensor, resident: StorageSet) -> str | None:
    if not has_storage(tensor):
        return "it is no dense tensor"
    if isinstance(tensor, Parameter) or tensor in resident or is_marked(tensor):
        return "it belongs to the model, or is marked, as by mark_not_offloadable"
    if _references_to_storage(tensor) > _FROM_ITS_TENSOR:
        return "its storage is in use by itself"
    storage = tensor.untyped_storage()
    if not storage.resizable() or (storage.device.type == "cpu" and storage.is_shared()):
        return _EXTERNAL
    # Without three known holders: ``storage`` here, the tensor, and a base.
    num_holders = use_count(storage._cdata) - 2 - (tensor._base is not None)
    if num_holders > 0:
        return f"its storage is shared by {num_holders} others"
    if tensor._base is not None and _references_to_base(tensor) > _FROM_ITS_VIEW:
        return "it is a view, and the tensor it is a view of is in use"
    # Autograd refers to a leaf itself, without another holder of its storage. So does the node that
    # accumulates its gradient, which reads nothing.
    is_accumulated = tensor.requires_grad and _is_leaf(tensor)
    node = get_gradient_edge(tensor).node if is_accumulated else None
    references = tensor._use_count()  # type: ignore[attr-defined]
    if references > (1 if node is None else 2):
        return "autograd has saved it outside of any group"
    return None


def _is_leaf(tensor: Tensor) -> bool:
    """Whether no operator made the tensor. PyTorch raises for one of several views of a tensor that
    was changed in place since, because the graph of that view cannot be made anew.
    """
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def _references_to_base(view: Tensor) -> int:
    base = view._base
    return sys.getrefcount(base) + base._use_count()  # type: ignore[union-attr]


def _references_to_storage(tensor: Tensor) -> int:
    return sys.getrefcount(tensor.untyped_storage())


# References counted for a storage that only its tensor refers to, and a base that only its view.
_FROM_ITS_TENSOR = _references_to_storage(torch.empty(1, device="cpu"))
_FROM_ITS_VIEW = _references_to_base(torch.empty(1, device="cpu")[:])
