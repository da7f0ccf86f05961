"""What the chunks of a manager share, and how what they offload is moved."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from pp_offload._groups.chunk_queue import ChunkQueue
from pp_offload._groups.forced_release import ForcedRelease
from pp_offload._groups.plan import ChunkKey, Plan
from pp_offload._groups.prefetch import Prefetcher, Upcoming
from pp_offload._groups.split_backward import SplitBackward
from pp_offload._transfer.deduplication import CopyIndex
from pp_offload._transfer.engine import TransferEngine
from pp_offload._transfer.tensors import Eligibility, StorageSet
from pp_offload._transfer.ticket import Mover
from pp_offload._transfer.tiers import make_engine
from pp_offload._transfer.verify import Verifier
from pp_offload.backends import Stream, default_backend
from pp_offload.config import OffloadConfig


@dataclass
class Wiring:
    """What every chunk of a manager shares."""

    transfer: TransferEngine
    eligibility: Eligibility
    prefetcher: Prefetcher | None = None
    queue: ChunkQueue = field(default_factory=ChunkQueue)
    copies: CopyIndex = field(default_factory=CopyIndex)
    plan: Plan = field(default_factory=Plan)
    delayed: list[Callable[[], None]] = field(default_factory=list)
    """Commits to be done later, in forward order."""

    verifier: Verifier | None = None
    split: SplitBackward | None = None
    """For a schedule with such backwards."""

    is_enabled: bool = True
    has_warned: bool = False
    """Whether it was said that a group found no room on the host."""

    on_change: Callable[[], None] = field(default=lambda: None)
    """Called when a group was offloaded, so that there is more to prefetch."""

    number_chunk: Callable[[Any], ChunkKey | None] = field(default=lambda chunk: None)
    """Gives a chunk its key when its first group starts."""

    release: ForcedRelease = field(init=False)
    current_stream: Callable[[], Stream] = field(init=False)

    def __post_init__(self) -> None:
        self.current_stream = self.transfer.backend.current_stream
        self.release = ForcedRelease(self.eligibility)

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held for bookkeeping: see NOTE [ One lock ]."""
        return self.transfer.lock

    @property
    def mover(self) -> Mover:
        """What tickets are moved by."""
        return self.split or self.verifier or self.transfer

    def split_backward(self, chunks: frozenset[ChunkKey], *, is_keeping: bool) -> SplitBackward:
        """For a schedule that runs the backward of these chunks in two parts."""
        inner = self.verifier or self.transfer
        return SplitBackward(inner, self.transfer.backend, chunks, is_keeping=is_keeping)

    def go_on_as(self, old: Wiring) -> None:
        """In place of ``old``: what was marked stays marked, what was disabled disabled."""
        self.eligibility.kept = old.eligibility.kept
        self.is_enabled = old.is_enabled

    @classmethod
    def made(
        cls,
        transfer: TransferEngine,
        config: OffloadConfig,
        upcoming: Upcoming,
        queue: ChunkQueue,
        *,
        on_change: Callable[[], None],
        number_chunk: Callable[[Any], ChunkKey | None],
    ) -> Wiring:
        """As the options say, for chunks of which somebody knows what comes next."""
        return cls(
            transfer,
            Eligibility(transfer.backend.device, StorageSet()),
            Prefetcher(transfer, upcoming, config.prefetch_bytes),
            queue,
            verifier=Verifier(transfer) if config.verify else None,
            on_change=on_change,
            number_chunk=number_chunk,
        )

    @classmethod
    def alone(cls) -> Wiring:
        """For a chunk without a manager."""
        backend, config = default_backend(), OffloadConfig()
        return cls(make_engine(backend, config), Eligibility(backend.device, StorageSet()))
