"""Which slices of a model are on the device: the one in use, and those that come next.

NOTE [ Host writes ]
    The program writes parameters on the host whenever it likes, as an optimizer does, or
    ``load_state_dict``. So no copy of them is under way while the program runs: a slice's copy has
    ended before layers use it, that of a prefetched slice before it is given up, and when a forward
    or backward ends no slice is coming. A slice that is still on the device is used again only if
    its parameters have the version and address that they had when they were read.

Call pattern:

    cache = SliceCache(copies)
    tensors = cache.use(slice_)  # loads it, unless it was prefetched
    cache.prefetch(following)    # while compute uses the tensors
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch.nn import Parameter

from pp_offload._common.torch_private import queue_callback
from pp_offload._slices.plain_copies import PendingCopy, PlainCopies
from pp_offload._slices.running import Running
from pp_offload.errors import OffloadError


@dataclass(frozen=True, eq=False, slots=True)
class Slice:
    """The parameters of consecutive layers, in one forward."""

    label: str
    """For messages."""

    parameters: tuple[Parameter, ...]
    """On the host, each once."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes on the device."""
        return sum(parameter.nbytes for parameter in self.parameters)

    def has_same(self, other: Slice) -> bool:
        """Whether the parameters are the same objects."""
        mine, theirs = self.parameters, other.parameters
        return len(mine) == len(theirs) and all(map(_is_same, mine, theirs))


@dataclass(eq=False, slots=True)
class Loaded:
    """A slice on the device, or on its way there."""

    slice: Slice
    """Which one."""

    pending: PendingCopy
    """Its tensors."""

    stamps: list[tuple[int, int]]
    """Version and address of each parameter when it was read."""

    def is_fresh(self) -> bool:
        """Whether no parameter was written since."""
        return self.stamps == [stamp(one) for one in self.slice.parameters]


@dataclass(frozen=True, eq=False, slots=True)
class User:
    """Who computes with the slices."""

    thread: threading.Thread
    """On which."""

    running: Running
    """Says there whether it still does: an interrupt may have cut it off."""

    @property
    def is_elsewhere(self) -> bool:
        """Whether it is another thread."""
        return self.thread is not threading.current_thread() and self.thread.is_alive()

    @property
    def is_inside(self) -> bool:
        """Whether it is this thread, which has not come out."""
        return self.thread is threading.current_thread() and self.running.is_running


class SliceCache:
    """Brings slices to the device, a few at a time. See NOTE [ Host writes ].

    Args:
        copies: Brings them.
        num_resident: How many may be on the device: the one in use, and those that come.

    Attributes:
        num_coming: How many may come while one is in use.
        peak_bytes: The most bytes of parameters that were on the device at a time.
    """

    def __init__(self, copies: PlainCopies, num_resident: int = 2) -> None:
        self.copies = copies
        self.peak_bytes = 0
        self.num_coming = num_resident - 1
        self._current: Loaded | None = None
        self._coming: list[Loaded] = []
        self._ending: Callable[[], EndOfBackward | None] = lambda: None
        self._served: dict[int, tuple[weakref.ref[object], Sequence[Slice] | None]] = {}
        self._gone: deque[weakref.ref[object]] = deque()  # of those served
        self._user: dict[str, User] = {}

    def alone(self, call: Callable[..., Any], *args: Any) -> Any:
        """What ``call`` returns, which computes with other tensors in place of parameters.

        Raises:
            OffloadError: Another thread is inside.
        """
        running = Running()
        mine = User(threading.current_thread(), running)
        try:
            try:
                owner = self._user.setdefault("now", mine)  # atomic
                if owner.is_elsewhere:
                    raise _busy(owner.thread)
                if owner is not mine and not owner.is_inside:
                    self._user["now"] = mine
                return call(*args)
            finally:
                self._release(mine)
        finally:
            self._release(mine)  # an interrupt may have cut the first one off

    def _release(self, mine: User) -> None:
        if self._user.get("now") is mine:
            del self._user["now"]

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
        self._forget_unused()
        return sum(one.slice.nbytes for one in self._held())

    def _held(self) -> list[Loaded]:
        return [*([] if self._current is None else [self._current]), *self._coming]

    def use(self, wanted: Slice, index: int | None = None) -> Loaded:
        """The slice on the device, with its data. Another one that was in use is given up.

        Args:
            wanted: Which one.
            index: The parameter that is asked for, if it is one only.
        """
        self._forget_unused()
        loaded = self._current
        if loaded is not None and loaded.slice is wanted and index is not None:
            if loaded.stamps[index] == stamp(wanted.parameters[index]) and self._is_home(loaded):
                return loaded
        if loaded is None or not self._is_usable(loaded, wanted):
            del loaded  # its memory is for what comes now
            loaded = self._next(wanted)
        loaded.slice = wanted
        return loaded

    def prefetch(self, *wanted: Slice) -> None:
        """Start bringing slices that will be used next, unless they are there or coming.

        Args:
            wanted: In order. Those for which there is no room are left out.
        """
        wanted = wanted[: self.num_coming]
        if not wanted:
            return
        useless = [one for one in self._coming if not any(map(one.slice.has_same, wanted))]
        self._give_up(useless)
        for one in wanted:
            if not any(loaded.slice.has_same(one) for loaded in self._held()):
                self._coming.append(self._bring(one))

    def serve(self, user: object, slices: Sequence[Slice] | None = None) -> None:
        """Give slices up when ``user`` is gone: nobody will ask for them again.

        That is noticed at the next call, for ``user`` may go while autograd frees a node, where
        Python code would swallow the exception of a signal handler.

        Args:
            user: Whoever asks for the slices.
            slices: Those to give up; all when None.
        """
        ref = weakref.ref(user, self._gone.append)
        self._served[id(ref)] = ref, slices

    def _forget_unused(self) -> None:
        while self._gone:
            _, slices = self._served.pop(id(self._gone.popleft()))
            if slices is None:
                self.drop()
            else:
                self._forget(slices)

    def _forget(self, slices: Sequence[Slice]) -> None:
        if self._current is not None and self._current.slice in slices:
            self._current = None
        self._give_up([one for one in self._coming if one.slice in slices])

    def drop(self) -> None:
        """Give up all slices."""
        while self._gone:  # they have nothing left to give up
            del self._served[id(self._gone.popleft())]
        self._current = None
        self.settle()

    def settle(self) -> None:
        """Give up the slices that are coming: from now on the program may write on the host."""
        self._give_up(self._coming)

    def drop_after_backward(self) -> None:
        """Give up all slices when the backward that runs now has ended.

        A backward inside of it, as that of a reentrant checkpoint, changes nothing.
        """
        if self._ending() is None:
            ending = EndOfBackward(self)
            queue_callback(ending)
            self._ending = weakref.ref(ending)

    def _next(self, wanted: Slice) -> Loaded:
        """Make a slice the one in use: one that is coming, or one brought now."""
        self._current = None
        loaded = next((one for one in self._coming if one.slice.has_same(wanted)), None)
        if loaded is None:
            self.settle()
        else:
            self._coming.remove(loaded)
            self.copies.synchronize(loaded.pending)
        if loaded is None or not self._is_usable(loaded, wanted):
            del loaded
            loaded = self._bring(wanted)
            self.copies.synchronize(loaded.pending)
        self._current = loaded
        return loaded

    def _bring(self, wanted: Slice) -> Loaded:
        stamps = [stamp(parameter) for parameter in wanted.parameters]
        sources = [parameter.detach() for parameter in wanted.parameters]
        self.peak_bytes = max(self.peak_bytes, self.nbytes + wanted.nbytes)
        return Loaded(wanted, self.copies.copy_to_device(sources, wanted.label), stamps)

    def _give_up(self, useless: Sequence[Loaded]) -> None:
        self._coming = [one for one in self._coming if one not in useless]
        for loaded in useless:
            self.copies.synchronize(loaded.pending)

    def _is_usable(self, loaded: Loaded, wanted: Slice) -> bool:
        return self._is_home(loaded) and loaded.slice.has_same(wanted) and loaded.is_fresh()

    def _is_home(self, loaded: Loaded) -> bool:
        """Whether its memory belongs to the live compute stream."""
        return loaded.pending.stream == self.copies.backend.current_stream()


class EndOfBackward:
    """Empties a cache when a backward ends. One that raised drops its callbacks uncalled, so the
    cache is also emptied when this is gone.
    """

    def __init__(self, cache: SliceCache) -> None:
        self._cache = cache
        cache.serve(self)

    def __call__(self) -> None:
        """The backward has ended."""
        self._cache.drop()


def _busy(owner: threading.Thread) -> OffloadError:
    return OffloadError(
        f"thread {threading.current_thread().name!r} runs layers of a model, or of a copy of it, "
        f"in whose forward thread {owner.name!r} is; expected one at a time, for the layers' "
        "parameters are exchanged meanwhile; take a lock around both, or a model for each"
    )


def stamp(parameter: Parameter) -> tuple[int, int]:
    """What changes when a parameter is written, but for writes through ``.data``."""
    return parameter._version, parameter.data_ptr()


def _is_same(one: Parameter, other: Parameter) -> bool:
    return one is other
