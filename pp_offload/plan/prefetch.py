"""Brings payloads before backward asks, in numbers; see :mod:`pp_offload._groups.prefetch`.

prefetch = Prefetcher(transfer, queue, bounds.window)
prefetch.on_use(chunk, group)   # backward is there
prefetch.fill()                 # some of the window is free
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from pp_offload._groups.prefetch import LARGE_BYTES
from pp_offload._policy.bound import Bound
from pp_offload._policy.bounds import SMALL_BYTES, refill_below
from pp_offload.plan.chunks import ChunkState, GroupState, Saved
from pp_offload.plan.parts import WeightState
from pp_offload.plan.queue import BackwardQueue, Visit
from pp_offload.plan.transfer import Transfer


class Prefetcher:
    """Fills the window.

    Args:
        transfer: Brings payloads.
        queue: Says which chunks come next.
        window: On bytes that may be on the device unused.

    Attributes:
        second: The second part of a backward, while that runs.
    """

    def __init__(self, transfer: Transfer, queue: BackwardQueue, window: Bound) -> None:
        self.second: WeightState | None = None
        self._transfer = transfer
        self._reloads = transfer.reloads
        self._queue = queue
        self._window = window
        self._chunk: ChunkState | None = None
        self._current: GroupState | None = None
        self._is_done = False
        self._few_bytes = self._refill_below_bytes = refill_below(window.nbytes)

    def expect(self, nbytes: int) -> None:
        """A group of so many bytes leaves, and will come back."""
        self._is_done = False
        self._window.expect(nbytes)
        self._few_bytes = self._refill_below_bytes = refill_below(self._window.nbytes)

    def change(self) -> None:
        """As ``Step.change``: there may be more to bring than before."""
        self._is_done = False

    def resume(self, chunk: ChunkState, group: GroupState) -> None:
        """Backward is at a group again: fill the window from there on."""
        self._chunk, self._current, self._is_done = chunk, group, False
        self._few_bytes = self._refill_below_bytes = refill_below(self._window.nbytes)
        self.fill()

    def on_use(self, chunk: ChunkState, group: GroupState) -> None:
        """Backward uses a group: bring it, and fill the window."""
        if group is not self._current or not group.is_used:
            self._chunk, self._current, group.is_used = chunk, group, True
            if not group.is_brought:
                batch = self._missing(group, self._window.nbytes - self._reloads.nbytes, set())
                if batch:
                    self._load([batch], is_ahead=False)
        self.fill()

    def refill(self) -> None:
        """As ``TransferEngine.deliver`` does it."""
        if self._reloads.nbytes < self._refill_below_bytes:
            self.fill()

    def comes_soon(self, one: Saved) -> bool:
        """Whether backward will ask for it within the next window of bytes."""
        room = self._window.nbytes
        for following in self._after():
            for other in following.waiting():
                if other is one:
                    return True
                room -= other.nbytes
            if room < 0:
                return False
        return False

    def fill(self) -> None:
        """Bring what comes next until the window is full, once some of it is free."""
        group, unused_bytes = self._current, self._reloads.nbytes
        if group is None or self._is_done or unused_bytes > self._few_bytes:
            return
        room = self._window.nbytes - unused_bytes
        batches: list[list[Saved]] = []
        chosen: set[Saved] = set()
        following: Visit = group
        for following in chain[Visit]((group,), self._after()):
            if following.is_brought:
                continue
            batch = self._missing(following, room, chosen)
            batches.append(batch)
            chosen.update(batch)
            room -= sum([one.nbytes for one in batch])
            if not following.is_brought:
                break
        self._load(batches, is_ahead=True)
        if following.is_brought:  # the last one, so that all are
            self._is_done = True
            self._refill_below_bytes = 0

    def _after(self) -> Iterator[Visit]:
        """As ``StepRecord.after``, from the group on that backward is at."""
        if self.second is not None:
            yield from self.second.visits()
        elif self._chunk is not None and self._current is not None:
            yield from reversed(self._chunk.groups[: self._current.position])
        for one in self._queue.certain():
            yield from one.visits()

    def _missing(self, visit: Visit, room: int, chosen: set[Saved]) -> list[Saved]:
        batch: list[Saved] = []
        wanted = visit.wanted()
        may_exceed = not chosen and self._reloads.nbytes == 0
        is_current = visit is self._current
        for number, one in enumerate(wanted):
            is_here = one.arrival is not None or (is_current and one.source_in_flight is not None)
            if not is_here and one not in chosen:
                if one.nbytes > room and not (may_exceed and not batch):
                    visit.claim(wanted[:number])
                    return batch
                batch.append(one)
                room -= one.nbytes
        visit.claim(wanted)
        visit.is_brought = True
        return batch

    def _load(self, batches: Sequence[Sequence[Saved]], *, is_ahead: bool) -> None:
        for together in batched(batches):
            self._transfer.reload(together, is_ahead=is_ahead)


def batched(batches: Sequence[Sequence[Saved]]) -> Iterator[list[Saved]]:
    """Small payloads of several groups together, large ones of a group apart."""
    together: list[Saved] = []
    nbytes = 0
    for batch in batches:
        for one in batch:
            together.append(one)
            nbytes += one.nbytes
            if nbytes >= LARGE_BYTES:
                yield together
                together, nbytes = [], 0
        if nbytes >= SMALL_BYTES:
            yield together
            together, nbytes = [], 0
    if together:
        yield together
