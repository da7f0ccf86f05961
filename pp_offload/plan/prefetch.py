"""Reloads ahead of backward, in numbers.

    prefetcher = Prefetcher(copies, queue, bounds)
    prefetcher.expect(nbytes)            # a group has left
    prefetcher.on_use(chunk, group)      # backward uses it

Each method does what the one of the engine does that it names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from pp_offload._groups.prefetch import LARGE_BYTES, SMALL_BYTES, refill_below
from pp_offload.plan.bounds import Bounds
from pp_offload.plan.chunks import ChunkState, GroupState, Saved
from pp_offload.plan.copies import Copies
from pp_offload.plan.parts import WeightState
from pp_offload.plan.queue import BackwardQueue, Visit


class Prefetcher:
    """Fills one rank's window.

    Args:
        copies: Bring payloads.
        queue: Says which chunks come next.
        bounds: Have the window.

    Attributes:
        second: The second part of a backward, while it runs.
    """

    def __init__(self, copies: Copies, queue: BackwardQueue, bounds: Bounds) -> None:
        self.second: WeightState | None = None
        self._copies = copies
        self._queue = queue
        self._window = bounds.window
        self._chunk: ChunkState | None = None
        self._current: GroupState | None = None
        self._refill_below_bytes = refill_below(bounds.window.nbytes)
        self._is_done = False

    def change(self) -> None:
        """As ``Step.change``: there may be more to bring."""
        self._is_done = False

    def expect(self, nbytes: int) -> None:
        """As the method of ``Prefetcher`` of this name."""
        self._window.expect(nbytes)
        self._refill_below_bytes = refill_below(self._window.nbytes)

    def resume(self, chunk: ChunkState, group: GroupState) -> None:
        """As the method of ``Prefetcher`` of this name."""
        self._chunk, self._current = chunk, group
        self._is_done = False
        self._refill_below_bytes = refill_below(self._window.nbytes)
        self.fill()

    def on_use(self, chunk: ChunkState, group: GroupState) -> None:
        """As the method of ``Prefetcher`` of this name."""
        if group is not self._current or not group.is_used:
            self._chunk, self._current = chunk, group
            if not group.is_used:
                group.is_used = True
                self._copies.watch.reached(chunk.key, group.position)
            if not group.is_brought:
                room = self._window.nbytes - self._copies.reload_bytes
                batch = self._missing(group, room, set())
                if batch:
                    self._load([batch], is_ahead=False)
        self.fill()

    def refill(self) -> None:
        """As ``TransferEngine.deliver`` does it."""
        if self._copies.reload_bytes < self._refill_below_bytes:
            self.fill()

    def fill(self) -> None:
        """As the method of ``Prefetcher`` of this name."""
        group, window_bytes, reload_bytes = (
            self._current,
            self._window.nbytes,
            self._copies.reload_bytes,
        )
        if group is None or self._is_done or reload_bytes > refill_below(window_bytes):
            return
        room = window_bytes - reload_bytes
        batches: list[list[Saved]] = []
        chosen: set[Saved] = set()
        following: Visit = group
        for following in chain[Visit]((group,), self._after()):
            if following.is_brought:
                continue
            batch = self._missing(following, room, chosen)
            batches.append(batch)
            chosen.update(batch)
            room -= sum(one.nbytes for one in batch)
            if not following.is_brought:
                break
        self._load(batches, is_ahead=True)
        if following.is_brought:  # the last one, so that all are
            self._is_done = True
            self._refill_below_bytes = 0

    def comes_soon(self, one: Saved) -> bool:
        """As the method of ``Prefetcher`` of this name."""
        room = self._window.nbytes
        for following in self._after():
            for other in following.waiting():
                if other is one:
                    return True
                room -= other.nbytes
            if room < 0:
                return False
        return False

    def _after(self) -> Iterator[Visit]:
        """As ``StepRecord.after``, from the group on that backward is at."""
        if self.second is not None:
            yield from self.second.visits()
        elif self._chunk is not None and self._current is not None:
            yield from reversed(self._chunk.groups[: self._current.position])
        for one in self._queue.certain():
            yield from one.visits()

    def _missing(self, visit: Visit, room: int, chosen: set[Saved]) -> list[Saved]:
        """As the method of ``Prefetcher`` of this name."""
        batch: list[Saved] = []
        wanted = visit.wanted()
        may_exceed = not chosen and self._copies.reload_bytes == 0
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

    def _load(self, batches: list[list[Saved]], *, is_ahead: bool) -> None:
        """As the method of ``Prefetcher`` of this name."""
        copies = self._copies
        for together in batched(batches):
            copies.poll()
            num = copies.bring(together)
            if is_ahead:
                copies.moved.prefetched_reloads += num
            else:
                copies.moved.on_demand_reloads += num


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
