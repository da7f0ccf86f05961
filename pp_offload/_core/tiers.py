"""Where the bytes of a batch are off the device: a tier gives a place, and gets it back by itself.

    place = tier.take(batch, sizes, specs) # MemoryError: no room, nothing has changed
    place.tensors                        # host memory, shaped like the payloads
    ...                                  # the place is free when the batch is garbage

A tier of your own has ``take`` and gives an object with the attributes of :class:`Place`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pp_offload._memory.host_pool import HostBytes, HostPool

Spec = tuple[torch.Size, torch.dtype]
"""What a payload looks like: its shape and dtype."""


class Place(Protocol):
    """Host memory of a batch."""

    tensors: Sequence[Tensor]
    """One for each payload, of its shape and dtype."""

    last_use: Any
    """The event of the copy that used the memory last; whoever gets it next waits for that."""

    waits_for: Any
    """Events: copies of former owners that may still use the memory."""


class Tier(Protocol):
    """A place for the bytes of batches."""

    name: str

    def take(self, owner: object, sizes: Sequence[int], specs: Sequence[Spec]) -> Place:
        """Host memory for payloads, free again when ``owner`` is garbage.

        Args:
            owner: Referred to weakly.
            sizes: Bytes of each payload.
            specs: What each looks like.

        Raises:
            MemoryError: There is no room. The message names the budget.
        """
        ...


class HostTier:
    """Host memory under the budget of the process.

    Args:
        pool: Deals it out.
    """

    name = "host"

    def __init__(self, pool: HostPool) -> None:
        self.pool = pool

    def take(self, owner: object, sizes: Sequence[int], specs: Sequence[Spec]) -> HostBytes:
        """See :meth:`Tier.take`."""
        place = self.pool.take(sizes, owner)
        if specs != place.specs:  # else the same as in the last step, and shaped already
            place.specs = specs
            with torch.inference_mode(False):
                views = zip(place.views, specs, strict=True)
                place.tensors = [view.view(dtype).view(shape) for view, (shape, dtype) in views]
        return place
