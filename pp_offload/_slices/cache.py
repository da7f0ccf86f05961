"""Slices of a model on the device: the slice in use, and those that are prefetched.

    cache = SliceCache(copies)
    tensors = cache.use(slice_, run)  # loads it, unless it was prefetched; valid as long as the run
    cache.prefetch([following])       # while compute uses the tensors

NOTE [ Host writes ]
    The program writes parameters on the host whenever it likes, as an optimizer does, or
    ``load_state_dict``. So no slice is being copied while the program runs: the copy of a used
    slice ends before layers use it, that of a prefetched slice before the slice is discarded, and
    nothing is prefetched after a forward or backward ends. A slice that is still on the device is
    used again only if its parameters have the version and address with which they were read.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn

from torch import Tensor

from pp_offload._common.text import size_text
from pp_offload._common.torch_private import queue_callback
from pp_offload._core.statistics import OffloadStatistics
from pp_offload._hooks import is_in_backward
from pp_offload._slices.plain_copies import PendingCopy, PlainCopies
from pp_offload._slices.slices import Slice, stamp
from pp_offload.errors import OffloadError


@dataclass(eq=False, slots=True)
class Loaded:
    """A slice on the device, or in flight to it."""

    slice: Slice
    pending: PendingCopy
    stamps: list[tuple[int, int]]  # version and address of each parameter when it was read


class SliceCache:
    """Loads slices to the device, at most ``num_resident`` at a time. See NOTE [ Host writes ]."""

    def __init__(self, copies: PlainCopies, num_resident: int = 2) -> None:
        self.copies, self.num_ahead, self.peak_bytes = copies, num_resident - 1, 0
        # The slice in use and prefetched slices, by the forward or backward that frees them.
        self._by_user: weakref.WeakKeyDictionary[Any, list[Loaded]] = weakref.WeakKeyDictionary()
        self._backward_end: Callable[[], EndOfBackward | None] = lambda: None
        self._lock, self._owner = threading.RLock(), threading.current_thread()

    def locked(self, call: Callable[..., Any], *args: Any) -> Any:
        """Return the result of ``call``; raise an OffloadError while another thread runs one."""
        if not self._lock.acquire(blocking=False):
            raise OffloadError(
                f"thread {threading.current_thread().name!r} runs layers of a model, or of a copy "
                f"of it, in whose forward thread {self._owner.name!r} is; expected one at a time, "
                "for the layers' parameters are exchanged meanwhile; take a lock around both, or a "
                "model for each"
            )
        try:
            self._owner = threading.current_thread()
            return call(*args)
        finally:
            self._lock.release()

    def __deepcopy__(self, memo: object) -> SliceCache:
        return self  # copies of a model share what moves their tensors

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a model whose parameters wait on the host cannot be pickled: streams and host "
            "memory belong to it; save model.state_dict(), whose names are those without offload"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the slices that are on the device or in flight to it."""
        return sum([loaded.slice.nbytes for loaded in self._resident()])

    def _resident(self) -> list[Loaded]:
        return next(iter(self._by_user.values()), [])

    def use(self, slice_: Slice, user: object, index: int | None = None) -> list[Tensor]:
        """Return a slice's tensors on the device, with their data, and discard the slice in use.
        They stay as long as ``user``: a forward, or the current backward. With an ``index``, only
        this parameter is used.
        """
        if not slice_.parameters:
            return []
        if is_in_backward():
            user = self._backward_end()  # of the backward around a reentrant checkpoint, if in one
            if user is None:
                user = EndOfBackward(self)
                queue_callback(user)
                self._backward_end = weakref.ref(user)
        resident = self._resident()
        if not (resident and self._is_valid(resident[0], slice_, index)):
            del resident[:1]  # frees its memory for the next slice
            if not any(self._is_valid(loaded, slice_, None) for loaded in resident):
                self._discard(resident, resident[:])
                resident.append(self._load(slice_))
            resident.sort(key=lambda loaded: not loaded.slice.has_same(slice_))
            self.copies.synchronize(resident[0].pending)
        if user not in self._by_user:
            self._by_user = weakref.WeakKeyDictionary({user: resident})
        return resident[0].pending.tensors

    def _is_valid(self, loaded: Loaded, slice_: Slice, index: int | None) -> bool:
        """Whether ``loaded`` has current parameters, in memory of the current compute stream."""
        indices = range(len(slice_.parameters)) if index is None else (index,)
        return (
            loaded.pending.stream == self.copies.backend.current_stream()
            and loaded.slice.has_same(slice_)
            and all(loaded.stamps[i] == stamp(slice_.parameters[i]) for i in indices)
        )

    def prefetch(self, following: Iterable[Slice]) -> None:
        """Start loading the slices used next, in order, as far as ``num_resident`` permits."""
        resident, slices = self._resident(), list(islice(following, self.num_ahead))
        if not (resident and slices):
            return
        useless = [loaded for loaded in resident[1:] if not any(map(loaded.slice.has_same, slices))]
        self._discard(resident, useless)
        for slice_ in slices:
            if not any(loaded.slice.has_same(slice_) for loaded in resident):
                resident.append(self._load(slice_))

    def end_prefetch(self) -> None:
        """Discard prefetched slices: the program may write host parameters afterwards."""
        resident = self._resident()
        self._discard(resident, resident[1:])

    def clear(self) -> None:
        self.end_prefetch()
        self._by_user.clear()

    def _load(self, slice_: Slice) -> Loaded:
        stamps = [stamp(parameter) for parameter in slice_.parameters]
        sources = [parameter.detach() for parameter in slice_.parameters]
        self.peak_bytes = max(self.peak_bytes, self.nbytes + slice_.nbytes)
        return Loaded(slice_, self.copies.copy_to_device(sources, slice_.label), stamps)

    def _discard(self, resident: list[Loaded], useless: list[Loaded]) -> None:
        for loaded in useless:
            resident.remove(loaded)
            self.copies.synchronize(loaded.pending)


class CacheFigures:
    """Figures of the parameters kept on the host."""

    _cache: SliceCache

    def statistics(self) -> OffloadStatistics:
        """Return the bytes moved: parameters count as reloaded, gradients as offloaded. Checkpoints
        of an ``OffloadModel`` are not included.
        """
        return self._cache.copies.statistics()

    @property
    def parameter_bytes_on_device(self) -> int:
        """Bytes of these parameters that are on the device now."""
        return self._cache.nbytes

    @property
    def peak_parameter_bytes_on_device(self) -> int:
        """Most bytes of these parameters that were on the device at a time."""
        return self._cache.peak_bytes

    def _figures(self, parameters: Iterable[Tensor]) -> str:
        """Describe these parameters' bytes on the host, and the peak of them on the device."""
        nbytes = sum({id(p): p.nbytes for p in parameters}.values())
        return (
            f"{size_text(nbytes)} of parameters on the host; at most "
            f"{size_text(self._cache.peak_bytes)} of them on the device at a time"
        )


class EndOfBackward:
    """Empties a cache when a backward ends. If one raises, autograd drops this uncalled."""

    def __init__(self, cache: SliceCache) -> None:
        self._cache = cache

    def __call__(self) -> None:
        if self in self._cache._by_user:
            self._cache.clear()

    __del__ = __call__
