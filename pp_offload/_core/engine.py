"""The engine, shared by all chunks of a manager: sends groups off the device.

group = Group("mlp", engine=engine, min_numel=n)  # pack() saves
payloads = engine.payloads(group)                 # collected, and counted
engine.send(group, payloads)                      # queue copies; or engine.keep(group, payloads)
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from torch import Tensor

from pp_offload._common.processes import logger_of, warn_once
from pp_offload._core.batch import Batch
from pp_offload._core.eligibility import Eligibility, StorageSet
from pp_offload._core.group import Group, GroupState
from pp_offload._core.mover import Mover
from pp_offload._core.observers import Observers
from pp_offload._core.payloads import Payloads, by_storage, collect
from pp_offload._core.recipes import Chosen, Recipes
from pp_offload._core.saved import Saved
from pp_offload._core.shared import SharedCopies, restored_from
from pp_offload._core.tiers import Busy, HostTier
from pp_offload._core.verify import Verifier
from pp_offload._core.window import Order, Window
from pp_offload._memory.budget import OverBudgetError
from pp_offload.backends import Backend
from pp_offload.config import OffloadConfig
from pp_offload.errors import OffloadError

logger = logger_of(__name__)
T = TypeVar("T")

_ADVICE = "or call pp_offload.release_host_memory(): there is host memory that no tensor uses"


class Engine:
    """Offloads groups."""

    # Returns users of the host budget with idle memory, to be asked for it once.
    idle_others: Callable[[], Sequence[Any]] = tuple

    def __init__(
        self,
        backend: Backend,
        tier: HostTier,
        order: Order,
        config: OffloadConfig,
        observers: Observers | None = None,
    ) -> None:
        self.observers = observers or Observers()
        self.mover = Mover(backend, tier, config.max_in_flight_bytes, self.observers)
        if config.verify:
            self.mover.verifier = Verifier()
        self.window = Window(self.mover, order, config.prefetch_bytes)
        self.shared = SharedCopies()
        self.eligibility = Eligibility(backend.device, StorageSet())
        self.recipes: Recipes | None = None
        if config.rematerialize == "cheap":
            self.recipes = Recipes(self.mover, self.eligibility)
        self.reach = self.window.reach  # for a group that backward is about to use first
        self.current_stream = backend.current_stream
        # For each stream that computes a forward: it may allocate sources.
        self.follow = self.mover.in_flight.streams.follow
        self.follow(backend.current_stream())  # inputs may be made on it, outside forwards
        self.is_enabled = True
        # Whether an exception passed through the engine's own code, and its bookkeeping may be
        # wrong. The next step begins with another engine.
        self.is_torn = False

    def payloads(self, group: Group) -> Payloads:
        """Collect, and count, what an open group may send."""
        payloads, counts = self._collected(group), group.counts
        counts.num_tensors, counts.nbytes = len(payloads.sizes), sum(payloads.sizes)
        if (chosen := payloads.chosen) is not None:
            counts.num_tensors += len(chosen.recipes)
            counts.narrowed_bytes = sum([payloads.sizes[part] for part in payloads.parts])
            counts.recipe_bytes = sum([storage.nbytes() for *_, storage in chosen.recipes])
            payloads.beside_bytes += counts.recipe_bytes
        return payloads

    def _collected(self, group: Group) -> Payloads:
        saved = by_storage(group.saved_refs)
        self.shared.watch(saved)
        chosen = None if self.recipes is None else self.recipes.choose(group, saved)
        payloads = collect(saved)
        payloads.chosen = chosen
        return payloads

    def tear(self, failure: BaseException) -> None:
        """Mark the engine as torn, unless ``failure`` is one of its own errors: these leave its
        bookkeeping right. Any other may have come between two lines that belong together.
        """
        self.is_torn |= not isinstance(failure, OffloadError)

    def guarded(self, call: Callable[..., T], *args: Any) -> T:
        """Return ``call(*args)``, called from outside the engine's methods; see :meth:`tear`."""
        try:
            return call(*args)
        except BaseException as failure:
            self.tear(failure)
            raise

    def begin_step(self) -> None:
        """Forget copies of the last step: optimizers change parameters unseen."""
        self.shared.begin_step(self.eligibility.residents)

    def go_on_as(self, old: Engine) -> None:
        """Take over from ``old``: marked storages, proofs of recipes, and whether it is enabled."""
        self.eligibility.residents, self.is_enabled = old.eligibility.residents, old.is_enabled
        if self.recipes is not None and old.recipes is not None:
            self.recipes.go_on_as(old.recipes)

    def end(self) -> None:
        """Break the reference cycle: its last user frees the engine, not the garbage collector."""
        self.window.resume(None)
        self.mover.window = None

    def keep(
        self, group: Group, payloads: Payloads | None = None, *, is_lean: bool = False
    ) -> None:
        """Keep the group on the device; if ``is_lean``, without what recipes compute again."""
        chosen = payloads.chosen if payloads else None
        if chosen is not None and is_lean:
            assert payloads is not None and not chosen.reached
            chosen.copy_parameters()
            payloads.stay_apart()
            with self.mover.lock:
                self._give_up(group, chosen)
        elif chosen is not None:
            for _, members, _ in chosen.recipes:
                for saved in members:
                    saved.recipe = True
        group.move_to(GroupState.KEPT)
        for tell in self.observers.closed:
            tell(group, payloads)

    def send(self, group: Group, payloads: Payloads) -> None:
        """Queue copies of payloads that no other group has sent, and close the group. Without room
        off the device the group stays, with one warning. To be called without the lock: compute
        may have to wait for earlier copies.
        """
        mover = self.mover
        if payloads.chosen is not None:
            payloads.chosen.copy_parameters()  # before any bookkeeping: it may run out of memory
        try:
            while (make_room := self._try_to_send(group, payloads)) is not None:
                with suppress(OffloadError):  # a failed read raises where its tensor is unpacked
                    make_room()
            if mover.in_flight.queue:
                mover.keep_bounded(group.counts.copied_bytes)
            for tell in self.observers.closed:
                tell(group, payloads)
        except BaseException as failure:
            self.tear(failure)
            raise

    def _try_to_send(self, group: Group, payloads: Payloads) -> Callable[[], object] | None:
        """Send and close the group, or change nothing and return what to call before a retry."""
        with self.mover.lock:
            # Not in a capture: a launch recomputes storages that were copied before it.
            may_share = self.shared.copies and not self.mover.backend.is_capturing
            shared = self.shared.share(payloads) if may_share else {}
            own = payloads.without(shared.keys()) if shared else payloads
            batch = None
            if own.tensors:
                try:
                    batch = self.mover.offload(group.name, own, group.streams)
                except Busy as busy:
                    return busy.event.synchronize
                except MemoryError as failure:
                    idle = self.idle_others() if isinstance(failure, OverBudgetError) else ()
                    pool = self.mover.tier.pool
                    if idle and not pool.has_asked and not self.mover.backend.is_capturing:
                        pool.has_asked = True
                        return lambda: [each.trim() for each in idle]  # their locks, not ours
                    self._warn(group, MemoryError(f"{failure}, {_ADVICE}") if idle else failure)
                else:
                    self._let_go(group, own, batch)
            if shared:
                self._borrow(group, payloads, shared)
            group.engine = self  # the group may have started in another epoch
            self.mover.window = self.window  # end() may have cleared it on another thread
            is_kept = batch is None and not shared
            if payloads.chosen is not None and (batch is not None or not own.tensors):
                is_kept = is_kept and not payloads.chosen.recipes
                self._give_up(group, payloads.chosen)
            group.move_to(GroupState.KEPT if is_kept else GroupState.OFFLOADED)
            self.window.expect(group.counts.copied_bytes)
        return None

    def _let_go(self, group: Group, own: Payloads, batch: Batch) -> None:
        """Hand the payloads to ``batch``, and drop the tensors on the device."""
        if not self.mover.backend.is_capturing:
            self.shared.add(own, batch)
        group.batch = weakref.ref(batch)
        group.counts.copied_bytes = sum(own.sizes)
        for index, members in enumerate(own.members):
            for saved in members:
                saved.batch, saved.index = batch, index
                saved.tensor = saved.wrapper = None

    def _give_up(self, group: Group, chosen: Chosen) -> None:
        """Drop tensors that recipes compute again; keep the recipes' inputs longer."""
        group.counts.again_bytes = group.counts.recipe_bytes
        self.mover.counts.bytes_computed_again += group.counts.recipe_bytes
        for recipe, members, _ in chosen.recipes:
            for saved in members:
                saved.recipe = recipe
                saved.tensor = saved.wrapper = None
        again = Counter([(saved.batch, saved.index) for saved in chosen.reached])
        for (batch, index), num in again.items():
            batch.use_again(index, num, id(group))
        group.borrowed = [*group.borrowed, *[(weakref.ref(batch), i) for batch, i in again]]

    @staticmethod
    def _borrow(group: Group, payloads: Payloads, shared: Mapping[int, tuple[Batch, int]]) -> None:
        """Use copies in batches of other groups for the payloads in ``shared``."""
        group.borrowed = [(weakref.ref(batch), index) for batch, index in shared.values()]
        for position, (batch, index) in shared.items():
            batch.use_again(index, len(payloads.members[position]), id(group))
            for saved in payloads.members[position]:
                if batch.leaving is not None:
                    batch.leaving.watched.append((saved.here, saved.version, index))
                restored_from(batch, index, saved)
                saved.batch, saved.index = batch, index
                saved.tensor = saved.wrapper = None

    def offload(self, tensor: Tensor) -> Saved:
        """Offload one tensor by itself, for as long as the returned Saved lives."""
        group = Group("tensor", engine=self)
        saved = Saved(tensor, group)
        group.streams.append(self.current_stream())
        group.saved_refs.append(weakref.ref(saved))
        self.send(group, self.payloads(group))
        return saved

    def check_freed(self) -> list[str]:
        """Return, with ``verify=True``, messages on offloaded storages that were not freed."""
        if self.mover.verifier is None:
            return []
        self.guarded(self.mover.synchronize)
        return self.mover.verifier.check_freed()

    def _warn(self, group: Group, failure: MemoryError) -> None:
        warn_once(
            logger,
            self,
            "group '%s' stays on the device: no room elsewhere for its %d bytes (%s); further "
            "groups may stay without a warning",
            *(group.name, group.counts.nbytes, str(failure)),
        )
