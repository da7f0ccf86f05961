"""Has parameters stay on the host when the model around them is moved.

Trainers move a model to the device when they prepare it, and then again. What waits on the host
waits there for that reason; it is what a move leaves out, and all else goes.

    layer._apply = StaysOnHost(layer, places)  # model.to(device) leaves the places alone
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Module

from pp_offload._slices.places import Places
from pp_offload.errors import OffloadError


class StaysOnHost:
    """What ``Module.to`` and its like call of a layer.

    Args:
        layer: Whose method it becomes.
        places: Of the parameters that stay.
    """

    def __init__(self, layer: Module, places: Places) -> None:
        self._layer = layer
        self._places = places

    def __call__(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Module:
        """Apply ``fn`` to all that does not stay.

        Raises:
            OffloadError: It would change what stays in another way than by a move.
        """
        parameters = self._places.parameters()
        staying = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
        ids = {id(one) for one in staying}

        def apply(tensor: Tensor) -> Tensor:
            if id(tensor) not in ids:
                return fn(tensor)
            self._check_moves(tensor, fn)
            return tensor

        kind: Any = type(self._layer)
        found: Module = kind._apply(self._layer, apply, recurse)
        return found

    def _check_moves(self, tensor: Tensor, fn: Callable[[Tensor], Tensor]) -> None:
        dtype = fn(tensor.new_empty(())).dtype
        if dtype != tensor.dtype:
            raise OffloadError(
                f"a parameter that waits on the host has {tensor.dtype}, and the model is turned "
                f"into {dtype}; expected the dtype that it had; what comes before it in the "
                "model may have been converted already, so either "
                f"take that back with model.to({tensor.dtype}), or close() and convert the model "
                "again; at best it is converted before offload_layers()"
            )
