"""A layer that brings its own parameters to the device: a layer of any model is a slice.

Nobody calls the layers but their model. So each layer gets a ``forward`` of ours around its own:

    model.forward             a forward begins (see layer_stream)
      layer 0                 bring 0 to the device, start bringing 1
        tensors stand in the places of the parameters; its own forward computes
      layer 1                 let 0 go; 1 is there; start bringing 2
    end                       nothing is coming any more

NOTE [ A layer's parameters ]
    Forward: parameters stay as they are, on the host; tensors on the device stand in their places
    (:mod:`~pp_offload._slices.places`), joined to them by the nodes that take gradients back
    (:mod:`~pp_offload._slices.gradients`). What autograd saves of them is saved as references
    (:mod:`~pp_offload._slices.saved_parameters`). So when the layer's forward ends nobody has its
    memory, and backward brings it again when it asks for the first reference.

NOTE [ Computed again ]
    A checkpoint around a layer calls it again in backward, and so this ``forward``: it brings the
    layer as in forward. Where the layer runs a backward in its own forward, that is while it is
    there; then only the tensors are taken from the checkpoint that were taken before.
    A layer may also checkpoint what is in its own forward, with a function that is its attribute
    :data:`CHECKPOINT`, as those of Hugging Face do. Backward then calls only the inside. So
    meanwhile the attribute is a function that passes on a callable which brings the layer if it is
    not there. In that case the checkpoint saves all tensors itself, in forward and again in
    backward; of what it saves in backward nothing may be taken away, for it counts.

The forward is replaced, and no hook, since hooks are not called when an interrupt comes: tensors
would be left in the places of parameters.

Call pattern:

    layer.forward = StreamedForward(stream, number, "layers.0", layer, places)
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from pp_offload._common.torch_private import never_compiled
from pp_offload._hooks.regions import Chaining, is_in_backward, is_recomputing
from pp_offload._slices.cache import Slice
from pp_offload._slices.gradients import GradientPath, Turn, gated, on_device
from pp_offload._slices.layer_stream import LayerStream
from pp_offload._slices.places import Places
from pp_offload._slices.stand_ins import StandIn
from pp_offload.errors import OffloadError

CHECKPOINT = "_gradient_checkpointing_func"
"""Source: transformers ``GradientCheckpointingLayer``."""


class StreamedForward:
    """The forward of a layer. See NOTE [ A layer's parameters ].

    Args:
        stream: Of the model.
        number: Of the layer.
        label: For messages.
        layer: Whose forward it becomes.
        places: Of its parameters that wait on the host.

    Attributes:
        own: What was the layer's forward, if not that of its class.
        is_closed: Whether it does nothing any more.
    """

    def __init__(
        self, stream: LayerStream, number: int, label: str, layer: Module, places: Places
    ) -> None:
        self.places = places
        self.is_closed = False
        self._stream = stream
        self._number = number
        self._label = label
        self._layer = layer
        self.own: Callable[..., Any] | None = vars(layer).get("forward")
        self._thread: threading.Thread | None = None  # that computes with the parameters
        self._saving: Callable[[], Chaining] | None = None  # makes that thread's pack hook
        stream.layers[number] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamedForward:
        """That of a copy of the layer, which joins the other layers that are copied with it."""
        copied = object.__new__(StreamedForward)
        memo[id(self)] = copied
        for name, value in vars(self).items():
            setattr(copied, name, copy.deepcopy(value, memo))
        copied._stream.layers[copied._number] = copied
        return copied

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The layer's own forward; :func:`inspect.signature` asks for it."""
        return self.own if self.own is not None else type(self._layer).forward.__get__(self._layer)

    @never_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output.

        Raises:
            OffloadError: A parameter is not on the host, the layer writes its parameters, or
                another thread is in a layer of the model.
        """
        compute = self.__wrapped__
        if self._thread is threading.current_thread() and is_recomputing():
            call = partial(compute, *args, **kwargs)
            return call() if self._saving is None else self.places.saving(call, self._saving())
        return self.with_parameters(compute, args, kwargs, is_again=False)

    def slice(self) -> Slice:
        """The parameters that it computes with now."""
        return self.places.slice(self._label)

    def with_parameters(
        self, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, *, is_again: bool
    ) -> Any:
        """What ``compute`` returns while the layer's parameters are on the device.

        Args:
            compute: The forward, or what is inside of it.
            args: Of ``compute``.
            kwargs: Of ``compute``.
            is_again: Whether a checkpoint inside the layer runs it. See NOTE [ Computed again ].
        """
        self.places.settle()  # first: an interrupt may have left the layer as if it computed
        if self.is_closed or self._thread is threading.current_thread():
            return compute(*args, **kwargs)
        slice_ = self.slice()
        if not slice_.parameters:
            return compute(*args, **kwargs)
        return self._stream.cache.alone(self._try, slice_, compute, args, kwargs, is_again)

    def _try(self, *args: Any) -> Any:
        try:
            return self._compute(*args)
        except BaseException:
            if not is_in_backward():  # there a checkpoint stops early by raising
                self._stream.abandon()
            raise

    def _compute(
        self,
        slice_: Slice,
        compute: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Any,
        is_again: bool,
    ) -> Any:
        cache = self._stream.cache
        run, index, loaded = self._stream.arrive(self._number, slice_)
        versions = [tensor._version for tensor in loaded]
        path = GradientPath(cache.copies, self._label)
        tensors = on_device(slice_.parameters, loaded, path)
        args, kwargs, turn = _gated(args, kwargs, tensors, path)
        is_saving = torch.is_grad_enabled() and not is_again
        saving = partial(run.pack, index, loaded) if is_saving else None
        output = self.places.compute(
            slice_,
            tensors,
            partial(compute, *args, **kwargs),
            others=list(self._meanwhile(saving)),
            pack=None if saving is None else saving(),
        )
        if turn is not None:
            turn.register([output])
        if versions != [tensor._version for tensor in loaded]:
            raise OffloadError(
                f"{self._label} changed one of its parameters in place in its forward, which would "
                "be lost: it computes with a copy; expected parameters to be changed outside of "
                "forward; make it a buffer"
            )
        return output

    def _meanwhile(self, saving: Callable[[], Chaining] | None) -> Iterator[StandIn]:
        """While the parameters are on the device. See NOTE [ Computed again ]."""
        yield StandIn(vars(self), "_thread", threading.current_thread())
        yield StandIn(vars(self), "_saving", saving)
        attributes = vars(self._layer)
        checkpoint = attributes.get(CHECKPOINT)
        if checkpoint is not None:
            yield StandIn(attributes, CHECKPOINT, InsideLayer(self, checkpoint))


class InsideLayer:
    """The function with which a layer checkpoints what is inside of it.

    Args:
        forward: Of the layer.
        checkpoint: Its own function.
    """

    def __init__(self, forward: StreamedForward, checkpoint: Callable[..., Any]) -> None:
        self._forward = forward
        self._checkpoint = checkpoint

    def __call__(self, inside: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the checkpoint returns, of ``inside``."""

        def with_parameters(*args: Any, **kwargs: Any) -> Any:
            return self._forward.with_parameters(inside, args, kwargs, is_again=True)

        return self._checkpoint(with_parameters, *args, **kwargs)


def _gated(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], path: GradientPath
) -> tuple[tuple[Any, ...], dict[str, Any], Turn | None]:
    """Arguments behind gates, as far as they are tensors themselves: what is in a list or a cache
    stays where the model finds it.
    """
    names = [*range(len(args)), *kwargs]
    values: dict[int | str, Any] = dict(zip(names, [*args, *kwargs.values()], strict=True))
    found = {name: one for name, one in values.items() if isinstance(one, Tensor)}
    (behind,), turn = gated([tuple(found.values())], tensors, path)
    values.update(zip(found, behind, strict=True))
    return (
        tuple(values[i] for i in range(len(args))),
        {name: values[name] for name in kwargs},
        turn,
    )
