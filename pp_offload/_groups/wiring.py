"""What the chunks of a manager, or of a stash, share. It is put together here, and nowhere else.

wiring = Wiring.made(backend, config, step)
chunk = Chunk(min_offloaded_tensor_size, wiring)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import Tensor

from pp_offload._core.tensors import Eligibility, StorageSet
from pp_offload._groups.forced_release import ForcedRelease
from pp_offload._groups.group import Group
from pp_offload._groups.offloader import Offloader
from pp_offload._groups.prefetch import Prefetcher, Step
from pp_offload._memory.slabs import Allocate
from pp_offload._policy.bounds import left_of_budget
from pp_offload._policy.plan import Plan
from pp_offload._transfer.engine import TransferEngine
from pp_offload._transfer.ticket import SavedActivation
from pp_offload._transfer.tiers import make_engine
from pp_offload._transfer.verify import Verifier
from pp_offload.backends import (
    AcceleratorBackend,
    Backend,
    GraphSafeBackend,
    Stream,
    default_backend,
)
from pp_offload.config import AUTO, OffloadConfig


@dataclass
class Wiring:
    """What the chunks of a manager, or of a stash, share."""

    transfer: TransferEngine
    offloader: Offloader
    step: Step
    prefetcher: Prefetcher
    plan: Plan = field(default_factory=Plan)
    delayed: list[Callable[[], None]] = field(default_factory=list)
    """Commits to be done later, in forward order."""

    is_enabled: bool = True
    eligibility: Eligibility = field(init=False)
    release: ForcedRelease = field(init=False)
    current_stream: Callable[[], Stream] = field(init=False)

    def __post_init__(self) -> None:
        backend = self.transfer.backend
        self.current_stream = backend.current_stream
        self.eligibility = Eligibility(backend.device, StorageSet())
        self.release = ForcedRelease(self.eligibility)

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held for bookkeeping: see NOTE [ One lock ]."""
        return self.transfer.lock

    def renew_if_torn(self) -> None:
        """Nothing: this engine survives an exception at any point."""

    def offload_alone(self, tensor: Tensor) -> SavedActivation:
        """Offload one tensor by itself; it lives off the device as long as what is returned."""
        group = Group("tensor")
        saved = SavedActivation(tensor, group)
        group.saved_refs.append(weakref.ref(saved))
        self.offloader.move(group, self.offloader.tickets(group))
        return saved

    def commit_delayed(self) -> None:
        """Do the commits that were delayed, in forward order."""
        while self.delayed:
            self.delayed.pop(0)()

    def go_on_as(self, old: Wiring) -> None:
        """Go on in place of ``old``: what was marked stays marked, what was disabled disabled."""
        self.eligibility.kept = old.eligibility.kept
        self.is_enabled = old.is_enabled

    @classmethod
    def made(
        cls,
        backend: Backend,
        config: OffloadConfig,
        step: Step,
        allocate: Allocate | None = None,
    ) -> Wiring:
        """A wiring as the options say, with prefetch.

        Args:
            backend: Device to work on.
            config: The options; those about the plan are not used here.
            step: Knows what backward visits next.
            allocate: Gives host memory, as for :func:`make_engine`.
        """
        if isinstance(backend, AcceleratorBackend) and backend.has_graphs:
            backend = GraphSafeBackend(backend)
        transfer = make_engine(backend, config, allocate)
        prefetcher = Prefetcher(transfer, step, config.prefetch_bytes)
        left = left_of_budget(config)
        if left is not None:
            num_auto = (config.max_in_flight_bytes, config.prefetch_bytes).count(AUTO)
            most = left // max(1, num_auto)
            transfer.copies.in_flight.bound.limit(max(1, most))  # 0 would wait for each copy
            prefetcher.limit(most)
        offloader = Offloader(transfer, Verifier(backend) if config.verify else None)
        return cls(transfer, offloader, step, prefetcher)

    @classmethod
    def alone(cls) -> Wiring:
        """A wiring for a chunk without a manager: with no order known, a group comes alone."""
        return cls.made(default_backend(), OffloadConfig(), Step())
