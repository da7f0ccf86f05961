"""A layer that brings its own parameters to the device: a layer of any model is a slice.

Each layer gets a ``forward`` of ours around its own, and the modules around the layers get hooks,
which say when a forward begins and ends:

    model.forward             a forward begins
      layer 0                 bring 0 to the device, start bringing 1
        tensors stand in the places of the parameters; its own forward computes
      layer 1                 let 0 go; 1 is there; start bringing 2
    end                       nothing is coming any more

NOTE [ Interrupted forwards ]
    A hook of an end is not called when an interrupt comes. So the module that began a forward may
    begin another, and a layer that is interrupted ends the forward by itself. A forward inside of
    another may in truth come after one that was interrupted outside of its layers, and weights may
    have been written since. So it uses nothing that is on the device.

NOTE [ Computed again ]
    A checkpoint around a layer calls this ``forward`` again in backward. A layer may also
    checkpoint what is in its own forward, with a function that is its attribute :data:`CHECKPOINT`,
    as those of Hugging Face do. Backward then calls only the inside. So meanwhile the attribute is
    a function that passes on a callable which brings the layer if it is not there. In that case the
    checkpoint saves all tensors itself, in forward and again in backward, for it counts them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from pp_offload._common.torch_private import never_compiled
from pp_offload._hooks.regions import is_in_backward, is_recomputing
from pp_offload._slices.cache import SliceCache
from pp_offload._slices.places import Exchange, Places
from pp_offload._slices.saved_parameters import OnDevice, SlicedRun

CHECKPOINT = "_gradient_checkpointing_func"
"""Source: transformers ``GradientCheckpointingLayer``."""


class LayerOrder:
    """The order in which layers ran in the last forward, to tell which come next.

    A model may skip layers, call one twice, or have several stacks. A wrong guess costs a copy that
    nobody uses. ``usual`` is the order expected of a layer that was not in the last forward.
    """

    def __init__(self, usual: Sequence[int]) -> None:
        self.usual = list(usual)
        self._last = self.usual
        self._seen: list[int] = []
        self._place = self._place_back = 0

    def begin(self) -> None:
        """A forward begins."""
        self._seen = []
        self._place = 0

    def end(self) -> None:
        """The forward has ended. One that ended early teaches nothing."""
        if self._seen and self._seen != self._last[: len(self._seen)]:
            self._last = self._seen
        self._seen = []

    def arrive(self, layer: int, num: int) -> list[int]:
        """The forward has come to a layer; the ``num`` that are expected next."""
        self._seen.append(layer)
        if layer in self._last[self._place :]:
            self._place = place = self._last.index(layer, self._place) + 1
            return self._last[place : place + num]
        place = self.usual.index(layer) + 1 if layer in self.usual else len(self.usual)
        return self.usual[place : place + num]

    def return_to(self, layer: int, num: int) -> list[int]:
        """A backward has come to a layer; the ``num`` that are expected next."""
        places = [place for place, number in enumerate(self._last) if number == layer]
        if not places:
            return []
        # Above the place of the layer before, it is another backward.
        self._place_back = max((p for p in places if p < self._place_back), default=places[-1])
        return self._last[max(0, self._place_back - num) : self._place_back][::-1]


class LayerStream:
    """What the layers of a model have in common: a cache, and the forward that runs."""

    def __init__(self, cache: SliceCache, usual: Sequence[int]) -> None:
        self.cache = cache
        self.layers: weakref.WeakValueDictionary[int, StreamedForward]
        self.layers = weakref.WeakValueDictionary()
        self._order = LayerOrder(usual)
        self._run: SlicedRun | None = None
        self._opener: Module | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerStream:
        """That of a copy of some of the layers."""
        memo[id(self)] = copied = LayerStream(self.cache, self._order.usual)
        return copied

    def hook(self, module: Module) -> list[RemovableHandle]:
        """Have a module around the layers say when its forward begins and ends."""
        return [
            module.register_forward_pre_hook(self._begin),
            module.register_forward_hook(self._end, always_call=True),
        ]

    def _begin(self, module: Module, args: object) -> None:
        if is_in_backward():
            return
        self.cache.drop()  # weights may have been written; see NOTE [ Interrupted forwards ]
        if self._run is None or self._opener is module:
            self._opener, self._run = module, SlicedRun(self.cache)
            self._order.begin()

    def _end(self, module: Module, args: object, output: object) -> None:
        if self._opener is module:
            self._opener = self._run = None
            self._order.end()
            self.cache.settle()

    def abandon(self) -> None:
        """The forward raised inside a layer."""
        self._opener = self._run = None
        self.cache.drop()

    def arrive(self, number: int, places: Places) -> OnDevice:
        """A layer is called: its parameters on the device. Those expected next start coming."""
        num = self.cache.num_coming
        if is_in_backward():
            return self._bring(SlicedRun(self.cache), places, self._order.return_to(number, num))
        if self._run is None:  # somebody calls the layer by itself
            self.cache.drop()
            return self._bring(SlicedRun(self.cache), places, [])
        return self._bring(self._run, places, self._order.arrive(number, num))

    def _bring(self, run: SlicedRun, places: Places, following: list[int]) -> OnDevice:
        layers = [self.layers.get(number) for number in following]
        slices = [one.places.slice() for one in layers if one is not None and not one.is_closed]
        return run.bring(places, [slice_ for slice_ in slices if slice_.parameters])


class StreamedForward:
    """The forward of a layer; its own one alone when this is closed."""

    def __init__(self, stream: LayerStream, number: int, layer: Module, places: Places) -> None:
        self.places = places
        self.is_closed = False
        self.own: Callable[..., Any] | None = vars(layer).get("forward")
        self._stream = stream
        self._number = number
        self._layer = layer
        self._thread: threading.Thread | None = None  # that computes with the parameters
        self._arrived: OnDevice | None = None
        stream.layers[number] = self

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The layer's own forward; :func:`inspect.signature` asks for it."""
        return self.own if self.own is not None else type(self._layer).forward.__get__(self._layer)

    @never_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output."""
        return self._with_parameters(partial(self.__wrapped__, *args, **kwargs), saves=True)

    def _with_parameters(self, call: Callable[[], Any], *, saves: bool) -> Any:
        """What ``call`` returns while the layer's parameters are on the device.

        They are saved as references, unless not ``saves``: see NOTE [ Computed again ].
        """
        if self.is_closed or not self.places.parameters():
            return call()
        if self._arrived is not None and self._thread is threading.current_thread():
            # A checkpoint around the layer finds tensors by position, so where a backward inside of
            # the forward runs it again, what was taken from it before is taken again.
            return self._arrived.compute(call, saves=saves and is_recomputing())
        return self._stream.cache.alone(self._try, call, saves)

    def _try(self, call: Callable[[], Any], saves: bool) -> Any:
        self._stream.layers[self._number] = self  # this may be that of a copy of the model
        try:
            arrived = self._stream.arrive(self._number, self.places)
            output = arrived.compute(call, list(self._meanwhile(arrived)), saves=saves)
            arrived.check_not_written()
            return output
        except BaseException:
            if not is_in_backward():  # there a checkpoint stops early by raising
                self._stream.abandon()
            raise

    def _meanwhile(self, arrived: OnDevice) -> Iterator[Exchange]:
        """What else is exchanged while the parameters are on the device."""
        yield vars(self), {"_thread": threading.current_thread(), "_arrived": arrived}
        attributes = vars(self._layer)
        if attributes.get(CHECKPOINT) is not None:
            yield attributes, {CHECKPOINT: partial(self._checkpoint, attributes[CHECKPOINT])}

    def _checkpoint(
        self, checkpoint: Callable[..., Any], inside: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """What the layer's own checkpoint returns, of ``inside`` with the layer's parameters."""

        def with_parameters(*args: Any, **kwargs: Any) -> Any:
            return self._with_parameters(partial(inside, *args, **kwargs), saves=False)

        return checkpoint(with_parameters, *args, **kwargs)
