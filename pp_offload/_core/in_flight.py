"""Copies to the host that are not known to be over, and how many device bytes they may keep.

See NOTE [ Keep-alive ] of ``mover.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from pp_offload._core.batch import Leaving
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
