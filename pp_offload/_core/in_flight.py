"""Device memory that a copy may still use, or that backward has still to use.

    InFlight  sources of copies to the host, until these have run
    Arrived   what came back, and what was dropped before its copy had run

See NOTE [ Keep-alive ] of ``mover.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from pp_offload._core.batch import Back, Leaving, Reload
from pp_offload._core.bound import Bound
from pp_offload.backends import Backend, Event, Stream


class InFlight:
    """Sources of copies to the host, in the order in which the copies run.

    Attributes:
        queue: What the copies read.
        nbytes: Bytes of that, which ``bound`` limits.
        then: What is done when some sources were let go, in order.
        streams: The compute streams of the device.
    """

    def __init__(self, streams: ComputeStreams, bound: Bound) -> None:
        self.queue: deque[Leaving] = deque()
        self.nbytes = 0
        self.then: deque[tuple[Leaving, Callable[[], None]]] = deque()
        self.streams = streams
        self.bound = bound

    def add(self, leaving: Leaving) -> None:
        self.queue.append(leaving)
        self.nbytes += leaving.nbytes

    def poll(self) -> None:
        queue = self.queue
        while queue and queue[0].offloaded.query():
            self.let_go_first()

    def let_go_first(self) -> None:
        """Let go of the oldest sources, whose copy has run, or was waited for."""
        leaving = self.queue.popleft()
        self.nbytes -= leaving.nbytes
        batch = leaving.batch()
        if batch is not None:
            batch.changed |= leaving.changed()
            batch.leaving = None
        actions = []
        while self.then and self.then[0][0] is leaving:
            actions.append(self.then.popleft()[1])
        del leaving  # or the actions would find the sources in use
        for action in actions:
            action()

    def after_last(self, action: Callable[[], None]) -> None:
        if self.queue:
            self.then.append((self.queue[-1], action))
        else:
            action()

    def is_over(self, last_bytes: int) -> bool:
        """Whether more is in flight than the bound allows, beside the group committed last."""
        bound = self.bound.nbytes
        return self.nbytes > (max(bound, last_bytes) if bound else 0)


class Arrived:
    """What came back to the device, and is not used up.

    Attributes:
        unused_bytes: Device bytes that autograd has still to ask for.
        backs: Of each living batch, whether or not anything is back.
        gone: Those whose batches are gone.
        abandoned: Memory that nobody wants, until the copy into it has run. Behind a reload that an
            exception cut off, which has no event, as long as the engine, whose epoch is over.
    """

    def __init__(self) -> None:
        self.unused_bytes = 0
        self.backs: set[Back] = set()
        self.gone: deque[Back] = deque()
        self.abandoned: deque[tuple[Tensor, Reload]] = deque()

    def is_needed(self) -> bool:
        return any([back() is not None for back in self.backs])

    def put_away(self, back: Back, index: int) -> None:
        """A payload leaves the device; its memory stays until a copy into it has run."""
        tensor, reload = back.device[index], back.reloads[index]
        if tensor is not None:
            assert reload is not None
            if not reload.is_there:
                self.abandoned.append((tensor, reload))
            back.device[index] = None
            back.num_away += 1
            self.unused_bytes -= back.sizes[index]

    def expect_uses(
        self, back: Back, uses: Sequence[int], part: frozenset[int] | None = None
    ) -> None:
        """What is left of a backward will use each payload so often, and its first part only those
        of ``part``. What will not be used is put away. The lock is held.
        """
        back.part = part
        for index, num in enumerate(uses):
            if num <= 0:
                self.put_away(back, index)
        back.left = list(uses)
        payloads = zip(back.device, uses, strict=True)
        back.num_away = sum([tensor is None and num > 0 for tensor, num in payloads])

    def give_up(self, back: Back, live: Stream) -> None:
        """Drop what came for another stream than the live one: that one may use it no more."""
        for index, reload in enumerate(back.reloads):
            if reload is not None and reload.stream != live:
                self.put_away(back, index)

    def let_go(self) -> None:
        """Batches are gone: abandon what came back of them and was never used."""
        while self.gone:
            back = self.gone.popleft()
            self.backs.discard(back)
            for index, tensor in enumerate(back.device):
                if tensor is not None:  # nearly never
                    self.put_away(back, index)

    def poll(self) -> None:
        """Let go of abandoned memory whose copy has run. Never blocks."""
        while self.abandoned:
            event = self.abandoned[0][1].event
            if event is None or not event.query():
                return
            self.abandoned.popleft()


class ComputeStreams(list[Stream]):
    """Compute streams of a device on which sources may have been allocated.

    All engines of a device share one: what one of them saw a forward compute, another may copy.
    There are few: PyTorch hands out the streams of a pool in turn.
    """

    def follow(self, stream: Stream) -> None:
        if stream not in self:
            self.append(stream)

    def wait(self, event: Event) -> None:
        """Have each of them wait. Blocks the thread where the device is the host."""
        for stream in list(self):
            stream.wait_event(event)

    @classmethod
    def of(cls, backend: Backend) -> ComputeStreams:
        """Those of the backend's device; of the backend, where that is ``cpu`` or ``meta``."""
        if backend.device.type in ("cpu", "meta"):
            return _OF_BACKENDS.setdefault(backend, cls())
        return _OF_DEVICES.setdefault(backend.device, cls())


_OF_BACKENDS: WeakKeyDictionary[Any, ComputeStreams] = WeakKeyDictionary()
_OF_DEVICES: WeakValueDictionary[torch.device, ComputeStreams] = WeakValueDictionary()
