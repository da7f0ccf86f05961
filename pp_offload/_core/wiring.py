"""The core behind the manager of today, until the switch: the names of the old transfer engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

from pp_offload._core.engine import Engine
from pp_offload._core.group import Group
from pp_offload._core.tiers import HostTier
from pp_offload._groups.forced_release import ForcedRelease
from pp_offload._memory.budget import RAISE_IT, HostBudget
from pp_offload._memory.host_pool import HostPool
from pp_offload._memory.slabs import Allocate
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
        budget = HostBudget(config.host_budget_bytes, RAISE_IT)
        self.pool = HostPool(allocate or backend.allocate_host, budget, trim=backend.trim_host)
        self.step = step
        self.engine = engine = Engine(backend, HostTier(self.pool), step, config)
        self.plan = Plan()
        self.delayed: list[Callable[[], None]] = []
        self.release = ForcedRelease(engine.eligibility)
        self.current_stream = backend.current_stream
        self.transfer = Transfer(self)
        self.offloader: Any = SimpleNamespace(
            copies=engine.shared, split=None, check_freed=engine.check_freed
        )
        self.prefetcher = Prefetcher(engine)
        left = left_of_budget(config)
        if left is not None:
            num_auto = (config.max_in_flight_bytes, config.prefetch_bytes).count(AUTO)
            most = left // max(1, num_auto)
            engine.mover.in_flight.bound.limit(max(1, most))
            engine.window.bound.limit(most)
            engine.window.resize()

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
        self.mover = mover = wiring.engine.mover
        self.backend = mover.backend
        self.lock = mover.lock
        self.listeners = Listeners()
        self.reloads = mover.arrived
        self.poll = mover.poll
        self.after_copies = mover.after_copies
        self.tiers = ()
        self.copies = SimpleNamespace(
            in_flight=mover.in_flight, stopwatch=Stopwatch(), join=mover.join
        )

    @property
    def counters(self) -> Any:
        """What was moved."""
        return self.mover.counts

    def compact(self) -> None:
        """Between steps."""
        if not self.backend.is_capturing:
            with self.lock:
                self.poll()
                self._wiring.pool.settle()

    def release_idle(self) -> None:
        """Give memory back to the system that nobody needs."""
        if not self.backend.is_capturing:
            self.mover.synchronize()
            with self.lock:
                self._wiring.pool.trim()

    retire = release_idle


class Stopwatch:
    """Times nothing yet."""

    def start(self) -> None:
        """None: nothing is timed."""

    def stop(self, laps: object) -> bool:
        """Nothing was timed."""
        return False


class Prefetcher:
    """The names of the old prefetcher."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.window = engine.window.bound

    def choose(self, nbytes: int) -> None:
        """The window is this from now on."""
        with self._engine.mover.lock:
            self.window.choose(nbytes)
            self._engine.window.resize()

    def resume(self, group: Group) -> None:
        """Backward is at ``group`` again."""
        with self._engine.mover.lock:
            self._engine.window.begin_at(group)
            self._engine.window.fill()

    approach = resume

    def fill(self) -> None:
        """Bring what comes next."""
        self._engine.window.fill()

    def reset(self) -> None:
        """The step is over."""
        with self._engine.mover.lock:
            self._engine.window.begin_at(None)
