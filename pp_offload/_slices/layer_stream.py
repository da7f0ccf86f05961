"""What the layers of a model have in common: which forward runs, and which layer comes next.

The layers do not know of one another, and nobody says when a forward begins. So modules around them
get hooks, and the outermost one that runs is the forward. While it runs layers come ahead of their
use; when it has ended nothing is coming, for then the program writes on the host.

    stream = LayerStream(cache, order)
    hooks = Around(stream).hook(model)
    run, index, tensors = stream.arrive(number, slice_)   # a layer is called

NOTE [ Guarded ]
    A hook of an end is not called when an interrupt comes. So the module that began a forward may
    begin another, and a layer that is interrupted ends the forward by itself. A forward inside of
    another may in truth come after one that was interrupted outside of its layers, and weights may
    have been written since. So it uses nothing that is on the device. One that begins before any
    layer came loses nothing so; the second of two stacks brings its first layer again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from pp_offload._hooks.regions import is_in_backward
from pp_offload._slices.cache import Slice, SliceCache
from pp_offload._slices.layer_order import LayerOrder
from pp_offload._slices.saved_parameters import SlicedRun


class Streamed(Protocol):
    """A layer, as others see it."""

    is_closed: bool

    def slice(self) -> Slice:
        """The parameters that it computes with now."""
        ...


class LayerStream:
    """What the layers of a model have in common: a cache, and the forward that runs.

    Args:
        cache: Brings layers to the device.
        order: Says which come next.
    """

    def __init__(self, cache: SliceCache, order: LayerOrder) -> None:
        self.cache = cache
        self.order = order
        self.layers: weakref.WeakValueDictionary[int, Streamed] = weakref.WeakValueDictionary()
        self._run: SlicedRun | None = None
        self._opener: Module | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerStream:
        """That of a copy of some of the layers, which join it."""
        copied = LayerStream(self.cache, LayerOrder(self.order.usual))
        memo[id(self)] = copied
        return copied

    def begin(self, opener: Module) -> None:
        """A forward begins in a module, unless it is inside of another."""
        if is_in_backward():
            return
        self.cache.drop()  # a write through .data leaves no trace; see NOTE [ Guarded ]
        if self._run is not None and self._opener is not opener:
            return
        self._opener, self._run = opener, SlicedRun((), self.cache)
        self.order.begin()

    def end(self, opener: Module) -> None:
        """The forward that began in this module has ended, or raised."""
        if self._opener is not opener:
            return
        self._opener = self._run = None
        self.order.end()
        self.cache.settle()

    def abandon(self) -> None:
        """The forward raised inside a layer."""
        self._opener = self._run = None
        self.cache.drop()

    def arrive(self, number: int, slice_: Slice) -> tuple[SlicedRun, int, list[Tensor]]:
        """The run that a call of a layer belongs to, its index there, and its parameters on the
        device. Those that are expected next start coming.
        """
        num = self.cache.num_coming
        if is_in_backward():
            run, following = SlicedRun((), self.cache), self.order.return_to(number, num)
            self.cache.drop_after_backward()
        elif self._run is None:  # somebody calls the layer by itself
            self.cache.drop()
            run, following = SlicedRun((), self.cache), []
        else:
            run, following = self._run, self.order.arrive(number, num)
        index = run.add(slice_)
        loaded = self.cache.use(slice_)
        self.cache.prefetch(*self._slices_of(following))
        return run, index, loaded.pending.tensors

    def _slices_of(self, numbers: list[int]) -> Iterator[Slice]:
        for number in numbers:
            layer = self.layers.get(number)
            slice_ = None if layer is None or layer.is_closed else layer.slice()
            if slice_ is not None and slice_.parameters:
                yield slice_


class Around:
    """Hooks of modules that have the layers somewhere inside.

    Args:
        stream: Is told of each forward.
    """

    def __init__(self, stream: LayerStream) -> None:
        self._stream = stream

    def hook(self, module: Module) -> list[RemovableHandle]:
        """Register them."""
        return [
            module.register_forward_pre_hook(self._begin),
            module.register_forward_hook(self._end, always_call=True),
        ]

    def _begin(self, module: Module, args: object) -> None:
        self._stream.begin(module)

    def _end(self, module: Module, args: object, output: object) -> None:
        self._stream.end(module)
