"""Copies to the host under way, in numbers; see :mod:`pp_offload._transfer.in_flight`.

in_flight = InFlight(device, bounds.cap, watch)
in_flight.begin(saved, blocks, nbytes, offloaded)
in_flight.poll()
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pp_offload._policy.bound import Bound
from pp_offload.plan.bounds import Unwatched
from pp_offload.plan.chunks import Block, Held, Saved
from pp_offload.plan.device import NumberDevice
from pp_offload.simulate.clocks import VirtualEvent


@dataclass(slots=True)
class Pending:
    """A batch on its way to the host."""

    sources: list[Held]
    blocks: list[weakref.ref[Block]]
    nbytes: int
    offloaded: VirtualEvent


class InFlight:
    """Offloads in the order they began, in which they also end.

    Args:
        device: Whose compute waits.
        bound: On their bytes.
        watch: Times those waits.

    Attributes:
        bound: See above.
        nbytes: Under way.
        queue: In what batches.
    """

    def __init__(self, device: NumberDevice, bound: Bound, watch: Unwatched) -> None:
        self.bound = bound
        self.nbytes = 0
        self._host = device.host
        self._memory = device.memory
        self._watch = watch
        self.queue: deque[Pending] = deque()

    def begin(
        self, saved: Sequence[Saved], blocks: Sequence[Block], nbytes: int, offloaded: VirtualEvent
    ) -> None:
        """Keep sources until their copies have run; meanwhile they may be taken back."""
        if offloaded.time_s <= self._host.now_s:
            return
        for one in saved:
            one.source.num_holders += 1
            assert one.block is not None
            one.block.in_flight[one.begin] = one.source
        sources = [one.source for one in saved]
        self.queue.append(
            Pending(sources, [weakref.ref(block) for block in blocks], nbytes, offloaded)
        )
        self.nbytes += nbytes

    def poll(self) -> None:
        """Let go of what finished copies kept alive."""
        now_s, queue = self._host.now_s, self.queue
        while queue and queue[0].offloaded.time_s <= now_s:
            self._finish()

    def keep_bounded(self, last_bytes: int, poll: Callable[[], None]) -> None:
        """Make compute wait until no more is in flight than may be."""
        cap_bytes = self.bound.nbytes
        most = max(cap_bytes, last_bytes) if cap_bytes else 0
        while self.queue:
            poll()
            if self.nbytes <= most:
                return
            self._watch.wait(self.queue[0].offloaded)
            self._finish()

    def _finish(self) -> None:
        pending = self.queue.popleft()
        self.nbytes -= pending.nbytes
        for ref in pending.blocks:
            block = ref()
            if block is not None:
                block.in_flight.clear()
        for source in pending.sources:
            source.let_go(self._memory)
