"""A device made of CPU tensors, on which a forgotten wait is always an error.

Compute runs on the host in program order; copies wait in queues and run as late as the program
permits (``late``), at once (``eager``), or in some legal order drawn from a seed (``random``).
Targets hold garbage until their copy has run, queued copies keep nothing alive, and every access
is checked by :mod:`pp_offload.backends.happens_before`, so that luck does not count.

    backend = SimulatedBackend("late")
    with backend.activate():
        ...  # forward and backward; raises RaceError at the first unordered access
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pp_offload.backends.base import Stream
from pp_offload.backends.simulated_copies import POISON, QueuedCopy, WeakTensor, unwatched
from pp_offload.backends.simulated_streams import (
    ORDERS,
    SimulatedEvent,
    SimulatedStream,
    Timeline,
)

_METADATA_ONLY = ("empty", "new_empty", "zeros_like", "ones_like", "full_like", "new_zeros")


class SimulatedBackend:
    """CPU tensors as device tensors, copies out of order, races as errors.

    Args:
        order: When queued copies run: ``late``, ``eager`` or ``random``.
        seed: Which legal order ``random`` takes; the same seed, the same order.

    Raises:
        ValueError: ``order`` is none of the three.
    """

    def __init__(self, order: str = "late", seed: int = 0) -> None:
        self.order = order
        self.name = f"simulated {order}"
        self.device = torch.device("cpu")
        self.num_host_allocations = 0
        self._timeline = Timeline(order, seed)
        self.d2h: Stream = self._timeline.add_stream("d2h", is_copy=True)
        self.h2d: Stream = self._timeline.add_stream("h2d", is_copy=True)
        self._current = self._timeline.add_stream("compute", is_copy=False)

    @property
    def pending(self) -> int:
        """How many copies have not run yet."""
        return sum(1 for _ in self._timeline.queued_copies())

    def current_stream(self) -> SimulatedStream:
        """The live compute stream."""
        return self._current

    def new_stream(self, name: str) -> SimulatedStream:
        """Another compute stream, ordered with nothing.

        Raises:
            ValueError: The name is taken.
        """
        return self._timeline.add_stream(name, is_copy=False)

    @contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[SimulatedStream]:
        """Make ``stream`` the live compute stream inside."""
        previous, self._current = self._current, stream
        try:
            yield stream
        finally:
            self._current = previous

    def copy(
        self, stream: Stream, targets: list[Tensor], sources: list[Tensor], label: str
    ) -> None:
        """Check and queue the copies.

        Raises:
            RaceError: Nothing orders them after an earlier conflicting access.
        """
        assert isinstance(stream, SimulatedStream) and stream.is_copy
        self._timeline.enter()
        stream.clock.advance(self._timeline.detector.host)
        pairs = list(zip(targets, sources, strict=True))
        for target, source in pairs:
            self._check_copy(stream, source, "read", label, is_host=stream is self.h2d)
            self._check_copy(stream, target, "write", label, is_host=stream is self.d2h)
        copies = [
            QueuedCopy(WeakTensor(target), WeakTensor(source), label) for target, source in pairs
        ]
        self._timeline.queue_copies(stream, copies)

    def allocate_host(self, nbytes: int) -> Tensor:
        """Garbage bytes."""
        self._timeline.enter()
        self.num_host_allocations += 1
        with self._inside():
            buffer = torch.empty(nbytes, dtype=torch.uint8).fill_(POISON)
        self._timeline.detector.see(buffer, self._current.clock, is_host=True)
        return buffer

    def activate(self) -> AbstractContextManager[object]:
        """Watch every compute operation; :meth:`check` at the end."""
        return _Watch(self)

    def check(self) -> None:
        """Raise the race that the release of a tensor caused, if there was one."""
        self._timeline.detector.raise_fault()

    def synchronize(self) -> None:
        """Run all copies; the host knows of everything from now on."""
        self._timeline.synchronize()

    def before_operator(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Check what a compute operator reads and writes on the live stream."""
        self._timeline.enter()
        clock = self._current.clock
        clock.advance(self._timeline.detector.host)
        for tensor, is_write in _operands(func, args, kwargs):
            if _has_bytes(tensor):
                self._timeline.detector.see(tensor, clock, is_host=False)
                self._timeline.detector.access(
                    clock, tensor, "write" if is_write else "read", str(func)
                )

    def after_operator(self, outputs: Any) -> None:
        """Know which stream made which storage."""
        for tensor in _tensors_in(outputs):
            if _has_bytes(tensor):
                self._timeline.detector.see(tensor, self._current.clock, is_host=False)

    def _inside(self) -> AbstractContextManager[None]:
        """Operators that :meth:`activate` must not see."""
        return unwatched()

    def _check_copy(
        self, stream: SimulatedStream, tensor: Tensor, kind: str, label: str, *, is_host: bool
    ) -> None:
        self._timeline.detector.see(tensor, self._current.clock, is_host=is_host)
        self._timeline.detector.access(stream.clock, tensor, kind, label)


class _Watch(TorchDispatchMode):
    """Shows the backend every compute operator, before and after it runs."""

    def __init__(self, backend: SimulatedBackend) -> None:
        super().__init__()
        self._backend = backend

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_view(func):
            return func(*args, **kwargs)
        self._backend.before_operator(func, args, kwargs)
        outputs = func(*args, **kwargs)
        self._backend.after_operator(outputs)
        return outputs

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        if kind is None:
            self._backend.check()


@cache
def _is_view(func: Any) -> bool:
    """Whether an operator only makes another view: it returns an alias it does not write."""
    aliases = [value.alias_info for value in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


@cache
def _parameters(func: Any) -> tuple[tuple[str, bool], ...]:
    """Name of each parameter of an operator, and whether it is written."""
    arguments = func._schema.arguments
    return tuple((a.name, a.alias_info is not None and a.alias_info.is_write) for a in arguments)


def _operands(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Tensor, bool]]:
    """Tensors whose bytes an operator touches, and whether it writes them."""
    if func._schema.name.split("::")[-1].startswith(_METADATA_ONLY):
        return
    for index, (name, is_write) in enumerate(_parameters(func)):
        value = args[index] if index < len(args) else kwargs.get(name)
        for tensor in _tensors_in(value):
            yield tensor, is_write


def _tensors_in(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, list | tuple):
        return (item for item in value if isinstance(item, Tensor))
    return ()


def _has_bytes(tensor: Tensor) -> bool:
    """Whether it is an ordinary CPU tensor; sparse, meta and fake ones are not."""
    if tensor.layout is not torch.strided:
        return False
    try:
        return tensor.untyped_storage().device.type == "cpu"
    except (NotImplementedError, RuntimeError):
        return False


__all__ = ["ORDERS", "SimulatedBackend", "SimulatedEvent", "SimulatedStream"]
