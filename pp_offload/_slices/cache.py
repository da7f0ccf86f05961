"""Which slices of a model are on the device: the one in use, and those that come next.

    cache = SliceCache(copies)
    tensors = cache.use(slice_, run)  # loads it, unless it was prefetched; there as long as the run
    cache.prefetch(following)         # while compute uses the tensors

NOTE [ Host writes ]
    The program writes parameters on the host whenever it likes, as an optimizer does, or
    ``load_state_dict``. So no copy of them is under way while the program runs: a slice's copy has
    ended before layers use it, that of a prefetched slice before it is given up, and when a forward
    or backward ends no slice is coming. A slice that is still on the device is used again only if
    its parameters have the version and address that they had when they were read.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor

from pp_offload._common.torch_private import queue_callback
from pp_offload._core.statistics import OffloadStatistics
from pp_offload._hooks.regions import is_in_backward
from pp_offload._slices.places import Slice, stamp
from pp_offload._slices.plain_copies import PendingCopy, PlainCopies
from pp_offload.errors import OffloadError


@dataclass(eq=False, slots=True)
class Loaded:
    """A slice on the device, or on its way there.

    Attributes:
        slice: Which slice.
        pending: Its tensors.
        stamps: Version and address of each parameter when it was read.
    """

    slice: Slice
    pending: PendingCopy
    stamps: list[tuple[int, int]]


class SliceCache:
    """Brings slices to the device, at most ``num_resident`` at a time. See NOTE [ Host writes ]."""

    def __init__(self, copies: PlainCopies, num_resident: int = 2) -> None:
        self.copies = copies
        self.peak_bytes = 0
        self.num_coming = num_resident - 1
        # The slice in use and those that come, by the forward or backward with which they go.
        self._users: weakref.WeakKeyDictionary[Any, list[Loaded]] = weakref.WeakKeyDictionary()
        self._ending: Callable[[], EndOfBackward | None] = lambda: None
        self._lock = threading.RLock()
        self._owner = threading.current_thread()

    def alone(self, call: Callable[..., Any], *args: Any) -> Any:
        """What ``call`` returns; an OffloadError where another thread is in such a call."""
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
        """A copy of a model shares what moves its tensors."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a model whose parameters wait on the host cannot be pickled, for streams and host "
            "memory are part of it; save model.state_dict(), whose names are those without offload"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the slices that are on the device or coming."""
        return sum([loaded.slice.nbytes for loaded in self._held()])

    def _held(self) -> list[Loaded]:
        return next(iter(self._users.values()), [])

    def use(self, wanted: Slice, user: object, index: int | None = None) -> list[Tensor]:
        """The tensors of a slice on the device, with their data. Another slice is given up.

        Slices go with the ``user``, a forward, or with the backward that runs now. With an
        ``index``, this parameter alone is asked for.
        """
        if not wanted.parameters:
            return []
        if is_in_backward():
            user = self._backward()
        held = self._held()
        if not (held and self._serves(held[0], wanted, index)):
            del held[:1]  # its memory is for what comes now
            if not any(self._serves(loaded, wanted, None) for loaded in held):
                self._give_up(held, held[:])
                held.append(self._bring(wanted))
            held.sort(key=lambda loaded: not loaded.slice.has_same(wanted))
            self.copies.synchronize(held[0].pending)
        if user not in self._users:
            self._users = weakref.WeakKeyDictionary({user: held})
        return held[0].pending.tensors

    def _serves(self, loaded: Loaded, wanted: Slice, index: int | None) -> bool:
        """Whether this is the slice as it is now, in memory of the live compute stream."""
        asked = range(len(wanted.parameters)) if index is None else (index,)
        is_home = loaded.pending.stream == self.copies.backend.current_stream()
        is_same = loaded.slice is wanted or loaded.slice.has_same(wanted)
        # Nobody wrote what is asked for since it was read.
        return (
            is_home
            and is_same
            and all(loaded.stamps[i] == stamp(wanted.parameters[i]) for i in asked)
        )

    def prefetch(self, *wanted: Slice) -> None:
        """Start bringing slices that will be used next, in order, as far as there is room."""
        held, wanted = self._held(), wanted[: self.num_coming]
        if not (held and wanted):
            return
        useless = [loaded for loaded in held[1:] if not any(map(loaded.slice.has_same, wanted))]
        self._give_up(held, useless)
        for slice_ in wanted:
            if not any(loaded.slice.has_same(slice_) for loaded in held):
                held.append(self._bring(slice_))

    def settle(self) -> None:
        """Give up the slices that are coming: from now on the program may write on the host."""
        held = self._held()
        self._give_up(held, held[1:])

    def drop(self) -> None:
        """Give up all slices."""
        self.settle()
        self._users.clear()

    def _backward(self) -> EndOfBackward:
        """The backward that runs now; of a reentrant checkpoint's, the one around it."""
        ending = self._ending()
        if ending is None:
            ending = EndOfBackward(self)
            queue_callback(ending)
            self._ending = weakref.ref(ending)
        return ending

    def _bring(self, wanted: Slice) -> Loaded:
        stamps = [stamp(parameter) for parameter in wanted.parameters]
        sources = [parameter.detach() for parameter in wanted.parameters]
        self.peak_bytes = max(self.peak_bytes, self.nbytes + wanted.nbytes)
        return Loaded(wanted, self.copies.copy_to_device(sources, wanted.label), stamps)

    def _give_up(self, held: list[Loaded], useless: list[Loaded]) -> None:
        for loaded in useless:
            held.remove(loaded)
            self.copies.synchronize(loaded.pending)


class CacheFigures:
    """Figures of the parameters that wait on the host."""

    _cache: SliceCache

    def statistics(self) -> OffloadStatistics:
        """Bytes that were moved: parameters count as reloaded, gradients as offloaded.

        What the checkpoints of an ``OffloadModel`` move is not included.
        """
        return self._cache.copies.statistics()

    @property
    def parameter_bytes_on_device(self) -> int:
        """Bytes of these parameters that the device has now."""
        return self._cache.nbytes

    @property
    def peak_parameter_bytes_on_device(self) -> int:
        """The most bytes of these parameters that the device had at a time."""
        return self._cache.peak_bytes


class EndOfBackward:
    """Empties a cache when a backward ends. Where one raises, autograd lets go of this uncalled."""

    def __init__(self, cache: SliceCache) -> None:
        self._cache = cache

    def __call__(self) -> None:
        """The backward has ended."""
        if self in self._cache._users:
            self._cache.drop()

    __del__ = __call__
