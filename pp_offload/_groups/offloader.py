"""What the chunks of a manager, or of a stash, share: the engine, the step, and the plan.

    offloader = Offloader(backend, config, step)
    chunk = Chunk(min_offloaded_tensor_size, offloader)

NOTE [ Epochs ]
    An exception that comes through the engine's own code may have come between two lines that
    belong together. So it ends the engine's epoch: what begins next, a step, a forward or a
    context, begins with a fresh engine. Living graphs keep the old one, whose tensors and events
    they refer to themselves. It ends between two steps, once they are gone: where garbage is
    collected, or autograd frees a node, its destructors would swallow what a signal handler raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import Tensor

from pp_offload._core.engine import Engine
from pp_offload._core.group import Group
from pp_offload._core.observer import Observers
from pp_offload._core.statistics import OffloadStatistics, collect
from pp_offload._core.tiers import make_tier
from pp_offload._core.window import Visit
from pp_offload._groups.bounds import share_of_budget
from pp_offload._groups.forced_release import release
from pp_offload._groups.plan import Plan
from pp_offload._groups.split_backward import SplitBackward
from pp_offload._memory.host_pool import Allocate
from pp_offload.backends import Backend
from pp_offload.config import OffloadConfig

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")
_Act = Callable[Concatenate["Offloader", _Params], _Result]


def _tears(act: _Act[_Params, _Result]) -> _Act[_Params, _Result]:
    """An exception out of ``act`` ends the epoch."""

    @wraps(act)
    def guarded(self: Offloader, *args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        engine = self.engine
        try:
            return act(self, *args, **kwargs)
        except BaseException as failure:
            engine.tear(failure)
            raise

    return guarded


class NoStep:
    """The step of a chunk without a manager: the chunk has no key, and no group a next one."""

    def add(self, chunk: Any, split: SplitBackward | None) -> None:
        """See :meth:`StepRecord.add`."""

    def after(self, group: Group) -> Iterator[Visit]:
        """See :meth:`StepRecord.after`."""
        return iter(())

    def begin(self, group: Group) -> None:
        """See :meth:`StepRecord.begin`."""


class Offloader:
    """What chunks share.

    Args:
        backend: Device to work on.
        config: The options; those about the plan are not used here.
        step: A ``StepRecord``, which knows what backward visits next; None for a lone chunk.
        allocate: Gives so many bytes of host memory; None for the backend's own.

    Attributes:
        engine: Offloads groups, in this epoch.
        plan: Which groups stay.
        observers: Hear what the engines do.
        delayed: Commits to be done later, in forward order.
        split: Of a schedule whose backwards come in two parts.
    """

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
        self.observers = Observers()
        self.delayed: list[Callable[[], None]] = []
        self.split: SplitBackward | None = None
        self._torn: list[Engine] = []  # those of former epochs that living graphs need
        self.engine = self._fresh_engine()
        self._warned_releases: set[str] = set()
        most_bytes = share_of_budget(config)
        if most_bytes is not None:
            self.engine.mover.in_flight.bound.limit(max(1, most_bytes))  # 0: waits for each copy
            self.engine.window.bound.limit(most_bytes)
            self.engine.window.resize()

    def _fresh_engine(self) -> Engine:
        """An engine with memory of its own."""
        tier = make_tier(self.backend, self.config, self._allocate)
        return Engine(self.backend, tier, self.step, self.config, self.observers)

    def renew_if_torn(self) -> None:
        """Begin a new epoch, if an exception came through the code of this one's engine.

        The host waits for all copies: the old engine's may still use memory that goes with it, and
        which of them were queued is not known.
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
        new.window.resize()
        self._torn.append(old)
        self.engine = new  # last: an interrupt before leaves the old one, which is torn
        del old
        self._end_torn()

    def _end_torn(self) -> None:
        """Let engines of former epochs go that no living graph needs."""
        for engine in tuple(self._torn):
            with engine.mover.lock:
                is_needed = engine.mover.arrived.is_needed()
            if not is_needed:
                engine.end()
                self._torn.remove(engine)

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held for bookkeeping: NOTE [ One lock ]."""
        return self.engine.mover.lock

    def follow_parts(self, split: SplitBackward | None) -> None:
        """Backwards come in two parts from now on, or not any more."""
        if self.split is not None:
            self.observers.remove(self.split)
        self.split = split
        if split is not None:
            self.observers.add(split)

    def commit_delayed(self) -> None:
        """Do the commits that were delayed, in forward order."""
        while self.delayed:
            self.delayed.pop(0)()

    @_tears
    def release_after_copies(self, tensors: Iterable[Tensor]) -> None:
        """Empty storages that a user named, once the copies queued so far are over."""
        refs = [weakref.ref(tensor) for tensor in tensors]
        kept = self.engine.eligibility.kept
        self.engine.mover.after_copies(partial(release, refs, kept, self._warned_releases))

    @_tears
    def resume(self, group: Group | None) -> None:
        """Backward is at ``group`` again, or at none: the step is over."""
        self.engine.window.resume(group)

    @_tears
    def settle(self) -> None:
        """Between steps: let go of what is over, and put the host memory in order."""
        self._end_torn()
        if not self.backend.is_capturing:
            with self.lock:
                self.engine.mover.poll()
                tier = self.engine.mover.tier
                tier.retry()
                for pool in tier.pools:
                    pool.settle()

    @_tears
    def trim(self) -> None:
        """Give host memory back to the system that no living graph needs."""
        if not self.backend.is_capturing:
            with suppress(RuntimeError):  # a copy that failed is over
                self.engine.mover.synchronize()
            with self.lock:
                for pool in self.engine.mover.tier.pools:
                    pool.trim()

    def retire(self) -> None:
        """No more bytes will come: keep only what living saved tensors need."""
        self.trim()
        with self.lock:
            disk = self.engine.mover.tier.disk
            if disk is not None and not disk.in_use_bytes:
                disk.close()

    @_tears
    def statistics(self) -> OffloadStatistics:
        """Numbers about it, exact at the call."""
        return collect(self.engine.mover)
