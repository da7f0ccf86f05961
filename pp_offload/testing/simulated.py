"""Simulated device of CPU tensors, on which a forgotten wait is always an error.

Compute runs on the host in program order; copies wait in queues and run as late as the program
permits (``late``), at once (``eager``), or in some legal order drawn from a seed (``random``).
Targets hold garbage until their copy has run, queued copies keep nothing alive, and every access
is checked by :mod:`pp_offload.testing.happens_before`, so that luck does not count.

    backend = SimulatedBackend("late")
    with backend.activate():
        ...  # forward and backward; raises RaceError at the first unordered access

A dispatch mode watches every operator below autograd, in forward and backward alike. The operator's
schema says which arguments it writes. Views are ignored: they touch no byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import count
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from pp_offload._common.checks import brief
from pp_offload._common.operators import operator
from pp_offload._common.torch_private import TorchDispatchMode
from pp_offload.backends.base import Allocated, HasLiveStream, Stream, no_memory_in_captures
from pp_offload.errors import CaptureError
from pp_offload.testing.streams import POISON, QueuedCopy, SimulatedStream, Timeline, unwatched


class SimulatedBackend(HasLiveStream[SimulatedStream]):
    """Backend with CPU tensors as device tensors, late copies, and errors for races.

    Args:
        order: When queued copies run: ``late``, ``eager`` or ``random``.
        seed: Seed of the order ``random``; the same seed gives the same order.

    Raises:
        ValueError: ``order`` is none of these, or ``seed`` is no integer.
    """

    def __init__(self, order: str = "late", seed: int = 0) -> None:
        if not isinstance(seed, int):
            raise ValueError(f"seed is {brief(seed)}, expected an integer")
        self.order, self.name = order, f"simulated {order}"
        self.is_host, self.device = False, torch.device("cpu")
        self._timeline = Timeline(order, seed)
        self._numbers = count(1)  # of captures
        self.d2h: Stream = self._timeline.add_stream("d2h", is_copy=True)
        self.h2d: Stream = self._timeline.add_stream("h2d", is_copy=True)
        self._current = self._timeline.add_stream("compute", is_copy=False)

    @property
    def pending(self) -> int:
        """Number of copies that have not run yet."""
        return len(self._timeline.queued_copies())

    @property
    def device_bytes(self) -> int:
        """Bytes of the living device tensors that an operator or a copy has used."""
        return self._timeline.detector.device_bytes

    def take_device_peak(self) -> int:
        """Return the most :attr:`device_bytes` since the last call."""
        detector = self._timeline.detector
        peak, detector.device_bytes_peak = detector.device_bytes_peak, detector.device_bytes
        return peak

    @property
    def is_capturing(self) -> bool:
        """Whether a :meth:`capture` is entered."""
        return self._timeline.capture != 0

    def capture_id(self) -> int:
        """Number of the capture that is entered; 0 outside."""
        return self._timeline.capture

    def captures_on(self, stream: Stream) -> bool:
        """Whether a stream is part of the capture that is entered."""
        assert isinstance(stream, SimulatedStream)
        return stream.capture != 0

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Raise :class:`CaptureError` inside for all that CUDA forbids while it captures a graph.

        Work runs as outside: only the rules are simulated, not replay. At the end, the current
        stream must have waited for all that was captured.
        """
        self.synchronize()
        timeline, origin = self._timeline, self._current
        timeline.capture = origin.capture = number = next(self._numbers)
        try:
            yield
            for stream in timeline.streams.values():
                if stream.capture and not origin.past.covers(stream.last_event().past):
                    raise CaptureError(
                        f"capture {number} ends, but stream {origin.name} has not waited for "
                        f"stream {stream.name}; expected it joined"
                    )
        finally:
            timeline.capture = 0
            for stream in timeline.streams.values():
                stream.capture = 0

    def new_stream(self, name: str) -> SimulatedStream:
        """Make another compute stream, unordered with others.

        Raises:
            ValueError: The name is taken.
        """
        return self._timeline.add_stream(name, is_copy=False)

    def allocated(self) -> Allocated:
        """Return current bytes and peak of :attr:`device_bytes`."""
        detector = self._timeline.detector
        return Allocated(detector.device_bytes, detector.device_bytes_peak)

    def copy(
        self, stream: Stream, targets: list[Tensor], sources: list[Tensor], label: str
    ) -> None:
        """Check and queue the copies.

        Raises:
            RaceError: Nothing orders them after an earlier conflicting access.
        """
        assert isinstance(stream, SimulatedStream) and stream.is_copy
        self._timeline.enter()
        detector, is_back = self._timeline.detector, stream is self.h2d
        stream.advance(detector.host)
        pairs = list(zip(targets, sources, strict=True))
        for to, source in pairs:
            for tensor, kind, is_host in ((source, "read", is_back), (to, "write", not is_back)):
                history = detector.see(tensor.untyped_storage(), self._current, is_host=is_host)
                detector.access(stream, history, tensor, kind, label)
        self._timeline.queue_copies(stream, [QueuedCopy(*pair, label) for pair in pairs])

    def allocate_host(self, nbytes: int) -> Tensor:
        """Allocate host memory, filled with garbage.

        Raises:
            NotWhileCapturingError: A graph is captured.
        """
        self._timeline.enter()
        if self.is_capturing:
            raise no_memory_in_captures(nbytes)
        with unwatched():
            buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu").fill_(POISON)
        self._timeline.detector.see(buffer.untyped_storage(), self._current, is_host=True)
        return buffer

    def activate(self) -> AbstractContextManager[object]:
        """Watch every compute operation; run :meth:`check` at the end."""
        return Watch(self._timeline, self.current_stream)

    def check(self) -> None:
        """Raise the race that the release of a tensor caused, if there was one."""
        self._timeline.detector.raise_fault()

    def synchronize(self) -> None:
        """Run all copies, and have the host wait for all work."""
        timeline = self._timeline
        timeline.forbid_in_capture("the device is synchronized")
        with timeline.lock:
            timeline.enter()
            for stream in timeline.streams.values():
                stream.last_event().finish()


class Watch(TorchDispatchMode):
    """Check of operators inside, on the stream that ``live`` returns, and of frees at the end."""

    def __init__(self, timeline: Timeline, live: Callable[[], SimulatedStream]) -> None:
        super().__init__()
        self._timeline, self._live = timeline, live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, schema = kwargs or {}, operator(func)
        if schema.is_view:
            return func(*args, **kwargs)
        self._timeline.enter()
        detector, stream = self._timeline.detector, self._live()
        touched = [  # all made before this operator, which the stream does not know yet
            (detector.see(storage, stream, is_host=False), tensor, kind)
            for value, kind in schema.operands(args, kwargs)
            for tensor, storage in _with_bytes(value)
        ]
        stream.advance(detector.host)
        for history, tensor, kind in touched:
            detector.access(stream, history, tensor, kind, schema.label)
        outputs = func(*args, **kwargs)
        for _, storage in _with_bytes(outputs):
            detector.see(storage, stream, is_host=False)  # made by this stream
        return outputs

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None:
            self._timeline.detector.raise_fault()


def _with_bytes(value: Any) -> list[tuple[Tensor, UntypedStorage]]:
    """List the ordinary CPU tensors in an argument or output, not sparse, meta and fake tensors."""
    pairs = []
    for item in value if isinstance(value, list | tuple) else (value,):
        if isinstance(item, Tensor) and item.layout is torch.strided:
            with suppress(RuntimeError):  # raised by subclasses without a storage
                pairs.append((item, item.untyped_storage()))
    return [pair for pair in pairs if pair[1].device.type == "cpu"]
