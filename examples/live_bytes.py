"""What is made on a device and still lives there, counted storage by storage.

with LiveBytes("cuda") as live:
    loss = model(x)
    print(live.live)
    loss.backward()
print(live.peak)
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operators made inside the mode and that still live; their peak.

    It counts gradients and temporaries as well, and the buffers that the engine reloads into; what
    was there before counts nothing. Storages are followed weakly, so that they die as they would
    without it.
    """

    only_observes = True
    """Tells pp_offload that operators give the same results inside: it may run them again."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._device_type = device_type
        self._followed: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for tensor in args:
            if isinstance(tensor, Tensor):
                self._follow(tensor, 0)
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.device.type == self._device_type:
                self._follow(tensor, tensor.untyped_storage().nbytes())
        return result

    def _follow(self, tensor: Tensor, nbytes: int) -> None:
        storage = tensor.untyped_storage()
        key, followed = storage._cdata, self._followed
        if key in followed and followed[key]() is storage:
            return

        def forget(ref: weakref.ref[torch.UntypedStorage]) -> None:
            self.live -= nbytes
            if followed.get(key) is ref:
                del followed[key]

        followed[key] = weakref.ref(storage, forget)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
