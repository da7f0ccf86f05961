"""The core behind the manager of today, until the switch: the names of the old transfer engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from pp_offload._core.engine import Engine
from pp_offload._core.group import Group
from pp_offload._core.mover import Mover
from pp_offload._core.observer import Observers
from pp_offload._core.saved import Saved
from pp_offload._core.tier_chain import make_tier
from pp_offload._groups.forced_release import ForcedRelease
from pp_offload._memory.slabs import Allocate
from pp_offload._policy.bound import Bound
from pp_offload._policy.bounds import left_of_budget
from pp_offload._policy.plan import Plan
from pp_offload._transfer.listeners import Listeners
from pp_offload.backends import Backend, default_backend
from pp_offload.config import AUTO, OffloadConfig

logger = logging.getLogger(__name__)


class NoOrder:
    """A step with a single chunk, of whose backward nothing is known."""

    num_changes = 0

    def add(self, chunk: Any, split: Any) -> None:
        """It has no key."""

    def change(self) -> None:
        """Nothing is brought ahead."""

    def is_next(self, chunk: Any) -> bool:
        """Nobody knows."""
        return False

    def after(self, group: Group) -> Any:
        """Nobody knows."""
        return iter(())

    def begin(self, group: Group) -> None:
        """Nobody follows."""


class Wiring:
    """What the chunks of a manager, or of a stash, share."""

    def __init__(
        self,
        backend: Backend,
        config: OffloadConfig,
        step: Any,
        allocate: Allocate | None = None,
    ) -> None:
        self.backend, self.config, self.step = backend, config, step
        self._allocate = allocate or backend.allocate_host
        self.plan = Plan()
        self.observers = Observers()
        self.delayed: list[Callable[[], None]] = []
        self.current_stream = backend.current_stream
        self._begin()
        self.release = ForcedRelease(self.engine.eligibility)
        self.transfer = Transfer(self)
        self.offloader: Any = SimpleNamespace(
            copies=Copies(self),
            tickets=lambda group: self.engine.payloads(group),
            split=None,
            check_freed=lambda: self.engine.check_freed(),
        )
        self.prefetcher = Prefetcher(self)
        left = left_of_budget(config)
        if left is not None:
            num_auto = (config.max_in_flight_bytes, config.prefetch_bytes).count(AUTO)
            most = left // max(1, num_auto)
            self.engine.mover.in_flight.bound.limit(max(1, most))
            self.engine.window.bound.limit(most)
            self.engine.window.resize()

    def _begin(self) -> None:
        """A fresh engine, with memory of its own."""
        tier = make_tier(self.backend, self.config, self._allocate)
        self.engine = Engine(self.backend, tier, self.step, self.config, self.observers)

    def renew_if_torn(self) -> None:
        """Begin with a fresh engine, if an exception came through the code of the last one.

        Graphs that live keep the old one. Copies of its own may still use memory that goes with it,
        and which were queued is not known; so the host waits for all.
        """
        old = self.engine
        if not old.is_torn or self.backend.is_capturing:
            return
        with suppress(Exception):  # a copy that failed is over
            self.backend.synchronize()
        self._begin()
        new = self.engine
        new.eligibility.kept, new.is_enabled = old.eligibility.kept, old.is_enabled
        new.mover.in_flight.bound, new.window.bound = old.mover.in_flight.bound, old.window.bound
        new.mover.counts, new.mover.in_graphs = old.mover.counts, old.mover.in_graphs
        new.window.resize()
        self.release = ForcedRelease(new.eligibility)

    @classmethod
    def made(
        cls, backend: Backend, config: OffloadConfig, step: Any, allocate: Allocate | None = None
    ) -> Wiring:
        """As the options say."""
        return cls(backend, config, step, allocate)

    @classmethod
    def alone(cls) -> Wiring:
        """For a chunk without a manager."""
        return cls(default_backend(), OffloadConfig(), NoOrder())

    @property
    def is_enabled(self) -> bool:
        """Whether groups leave now."""
        return self.engine.is_enabled

    @is_enabled.setter
    def is_enabled(self, is_on: bool) -> None:
        self.engine.is_enabled = is_on

    @property
    def eligibility(self) -> Any:
        """Which tensors may leave."""
        return self.engine.eligibility

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held for bookkeeping."""
        return self.engine.mover.lock

    def offload_alone(self, tensor: Tensor) -> Saved:
        """Offload one tensor by itself; it lives off the device as long as what is returned."""
        return self.engine.offload(tensor)

    def commit_delayed(self) -> None:
        """Do the commits that were delayed, in forward order."""
        while self.delayed:
            self.delayed.pop(0)()

    def go_on_as(self, old: Wiring) -> None:
        """Go on in place of ``old``: what was marked stays marked, what was disabled disabled."""
        self.engine.eligibility.kept = old.engine.eligibility.kept
        self.is_enabled = old.is_enabled


class Transfer:
    """The names of the old transfer engine."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self.step = wiring.step
        self.backend = wiring.backend
        self.listeners = Listeners()

    @property
    def tiers(self) -> Any:
        """Where batches go."""
        return [self.mover.tier]

    @property
    def mover(self) -> Mover:
        """That of the engine of now."""
        return self._wiring.engine.mover

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held for bookkeeping."""
        return self.mover.lock

    @property
    def reloads(self) -> Any:
        """What came back."""
        return SimpleNamespace(nbytes=self.mover.arrived.unused_bytes)

    @property
    def copies(self) -> Any:
        """What is in flight."""
        mover = self.mover
        return SimpleNamespace(in_flight=mover.in_flight, join=mover.join)

    @property
    def counters(self) -> Any:
        """What was moved."""
        return self.mover.counts

    def wait_up_to(self, last: Any) -> None:
        """Have compute wait for some copies."""
        self.mover.wait_up_to(last)

    def poll(self) -> None:
        """Let go of what is finished."""
        self.mover.poll()

    def compact(self) -> None:
        """Between steps."""
        if not self.backend.is_capturing:
            with self.lock:
                self.poll()
                self.mover.tier.retry()
                for pool in self.mover.tier.pools:
                    pool.settle()

    def release_idle(self) -> None:
        """Give memory back to the system that nobody needs."""
        if not self.backend.is_capturing:
            with suppress(Exception):  # a copy that failed is over
                self.mover.synchronize()
            with self.lock:
                for pool in self.mover.tier.pools:
                    pool.trim()

    def retire(self) -> None:
        """No more bytes will come: keep only what living saved tensors need."""
        self.release_idle()
        with self.lock:
            disk = self.mover.tier.disk
            if disk is not None and not disk.in_use_bytes:
                disk.close()


class Copies:
    """The names of the old index of copies."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring

    def clear(self) -> None:
        """Forget all."""
        self._wiring.engine.shared.clear()

    def forget_dead(self) -> None:
        """Forget what is gone."""
        self._wiring.engine.shared.forget_dead()


class Prefetcher:
    """The names of the old prefetcher."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring

    @property
    def window(self) -> Bound:
        """How much comes ahead."""
        return self._wiring.engine.window.bound

    def choose(self, nbytes: int) -> None:
        """The window is this from now on."""
        with self._wiring.lock:
            self.window.choose(nbytes)
            self._wiring.engine.window.resize()

    def resume(self, group: Group) -> None:
        """Backward is at ``group`` again."""
        with self._wiring.lock:
            self._wiring.engine.window.begin_at(group)
            self._wiring.engine.window.fill()

    approach = resume

    def fill(self) -> None:
        """Bring what comes next."""
        self._wiring.engine.window.fill()

    def reset(self) -> None:
        """The step is over."""
        with self._wiring.lock:
            self._wiring.engine.window.begin_at(None)
