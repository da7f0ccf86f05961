"""Device memory that a copy may still use, or that backward has still to use.

    Bound     how many bytes these may be
    InFlight  sources of copies to the host, until these have run
    Arrived   reloaded payloads, and memory dropped before the copy into it had run
    ComputeStreams  streams whose memory copies wait for

See NOTE [ Keep-alive ] of ``mover.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from pp_offload._core.batch import Back, Leaving, Reload
from pp_offload.backends import Backend, Event, Stream
from pp_offload.config import AUTO

IN_FLIGHT_BYTES = 2**29  # default bound on bytes in flight to the host
SMALL_BYTES = 2**18  # smaller reloads of several groups are queued as one batch
REFILL_BYTES = 2**22  # a reload of fewer costs the host more time than the link, at 50 GB/s


class Bound:
    """A bound on bytes in flight in one direction: ``given``, or first ``least`` with AUTO."""

    def __init__(self, given: int | str, least: int) -> None:
        self.nbytes = given if isinstance(given, int) else least
        self._is_auto = self._follows_groups = given == AUTO

    def expect(self, group_bytes: int) -> None:
        """Raise the bound to at least twice ``group_bytes``, until :meth:`choose` was called."""
        if self._follows_groups:
            self.nbytes = max(self.nbytes, 2 * group_bytes)

    def choose(self, nbytes: int) -> None:
        """Set the bound, unless the option fixed it."""
        if self._is_auto:
            self._follows_groups = False
            self.nbytes = nbytes


def refill_below(window_bytes: int) -> int:
    """Return the unused bytes at which a window is refilled: early, so that copies never pause, but
    not after each small tensor.
    """
    return window_bytes - max(window_bytes // 8, min(window_bytes // 2, REFILL_BYTES))


class InFlight:
    """Sources of copies to the host, in the order in which the copies run."""

    def __init__(self, streams: ComputeStreams, bound: Bound) -> None:
        self.queue: deque[Leaving] = deque()  # sources of each copy, the oldest first
        self.nbytes = 0  # of the queued sources, which ``bound`` limits
        self.streams, self.bound = streams, bound

    def let_go_first(self) -> None:
        """Let go of the oldest sources, whose copy has run, or was waited for."""
        leaving = self.queue.popleft()
        self.nbytes -= leaving.nbytes
        batch = leaving.batch()
        if batch is not None:
            batch.changed |= leaving.changed()
            batch.leaving = None
        actions = leaving.then
        del leaving  # or the actions would find the sources in use
        for action in actions:
            action()


class Arrived:
    """Payloads on the device again that are not used up."""

    def __init__(self) -> None:
        self.unused_bytes = 0  # reloaded, which autograd has not asked for yet
        self.backs: set[Back] = set()  # of each living batch, wherever its payloads are
        self.gone: deque[Back] = deque()  # of each batch that was freed since let_go()
        # Unwanted memory, kept until the copy into it has run; kept as long as the engine if an
        # exception left that copy without an event.
        self.abandoned: deque[tuple[Tensor, Reload]] = deque()

    def put_away(self, back: Back, index: int) -> None:
        """Drop a payload from the device; its memory stays until a copy into it has run."""
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
        """Set the remaining uses of each payload, and the ``part`` that the first part of backward
        uses. Payloads without uses are dropped. The lock is held.
        """
        back.part = part
        for index, num in enumerate(uses):
            if num <= 0:
                self.put_away(back, index)
        back.uses_left = list(uses)
        payloads = zip(back.device, uses, strict=True)
        back.num_away = sum([tensor is None and num > 0 for tensor, num in payloads])

    def give_up(self, back: Back, live: Stream) -> None:
        """Drop payloads that came for another stream: ``live`` may not use their memory."""
        for index, reload in enumerate(back.reloads):
            if reload is not None and reload.stream != live:
                self.put_away(back, index)

    def let_go(self) -> None:
        """Drop reloaded payloads of freed batches, which nothing will use."""
        while self.gone:
            back = self.gone.popleft()
            self.backs.discard(back)
            for index, tensor in enumerate(back.device):
                if tensor is not None:  # nearly never
                    self.put_away(back, index)

    def poll(self) -> None:
        """Let go of abandoned memory whose copy has run. Never blocks."""
        for _ in range(len(self.abandoned)):
            event = self.abandoned[0][1].event
            if event is None:
                self.abandoned.rotate(-1)  # behind those whose copy will end
            elif event.query():
                self.abandoned.popleft()
            else:
                return


class ComputeStreams(list[Stream]):
    """Compute streams of a device on which sources may have been allocated. All engines of a device
    share one list: one engine may copy what a forward computed on a stream that another engine saw.
    The list is short: PyTorch reuses the streams of a pool.
    """

    def follow(self, stream: Stream) -> None:
        if stream not in self:
            self.append(stream)

    def wait(self, event: Event) -> None:
        """Make each stream wait for ``event``. Blocks the thread where the device is the host."""
        for stream in list(self):
            stream.wait_event(event)

    @classmethod
    def of(cls, backend: Backend) -> ComputeStreams:
        """Return the list of the backend's device; on ``cpu`` and ``meta``, of the backend."""
        if backend.device.type in ("cpu", "meta"):
            return _OF_BACKENDS.setdefault(backend, cls())
        return _OF_DEVICES.setdefault(backend.device, cls())


_OF_BACKENDS: WeakKeyDictionary[Any, ComputeStreams] = WeakKeyDictionary()
_OF_DEVICES: WeakValueDictionary[torch.device, ComputeStreams] = WeakValueDictionary()
