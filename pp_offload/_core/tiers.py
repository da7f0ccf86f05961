"""Where the bytes of a batch are off the device: a tier gives a place, and gets it back by itself.

place = tier.take(batch, sizes, specs) # MemoryError: no room, nothing has changed
place.tensors                        # host memory, shaped like the payloads
...                                  # the place is free when the batch is garbage
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pp_offload._memory.host_pool import HostBytes, HostPool
from pp_offload.backends import Event

Spec = tuple[torch.Size, torch.dtype]
"""What a payload looks like: its shape and dtype."""


class Place(Protocol):
    """Host memory of a batch, or what replaces it."""

    specs: Any
    """What each payload looks like."""

    last_use: Any
    """The event of the copy that used the memory last; whoever gets it next waits for that."""

    def keep(self) -> None:
        """Never be free again: a captured graph copies to or from here whenever it is launched."""
        ...

    @property
    def tensors(self) -> Sequence[Tensor]:
        """One for each payload, of its shape and dtype; none where the bytes are on disk alone."""
        ...

    @property
    def is_refused(self) -> bool:
        """Whether the bytes never came here, and are in the sources alone."""
        ...

    @property
    def waits_for(self) -> Sequence[Event]:
        """Copies of former owners that may still use the memory."""
        ...


class Busy(MemoryError):
    """Without room until ``event`` has ended. Nothing has changed; wait, and try again."""

    def __init__(self, event: Event) -> None:
        super().__init__("what is on its way has to make room first")
        self.event = event


class Tier(Protocol):
    """A place for the bytes of batches. The caller holds the mover's lock around each method."""

    name: str

    pools: Sequence[HostPool]
    """The host memory that it deals out."""

    disk: Any = None
    """What bytes go to behind host memory."""

    reads: Any = ()
    """What threads read for the mover, in order; it sends that on to the device."""

    def take(self, owner: object, sizes: Sequence[int], specs: Sequence[Spec]) -> Place:
        """Room for payloads, free again when ``owner`` is garbage.

        Args:
            owner: Referred to weakly.
            sizes: Bytes of each payload.
            specs: What each looks like.

        Raises:
            Busy: There will be room.
            MemoryError: There is none. The message names the budget.
        """
        ...

    def furthest(self) -> Event | None:
        """The end of what makes room next, if something does."""
        return None

    def poll(self) -> None:
        """Let go of what is not needed any more. Never blocks."""
        return

    def retry(self) -> None:
        """A step has ended: what failed may work again."""
        return

    def host_bytes_in_use(self) -> int:
        """Of living batches, and on their way."""
        return sum([pool.in_use_bytes for pool in self.pools])


class HostTier(Tier):
    """Host memory under the budget of the process.

    Args:
        pool: Deals it out.
    """

    name = "host"

    def __init__(self, pool: HostPool) -> None:
        self.pool = pool
        self.pools = [pool]

    def take(
        self, owner: object, sizes: Sequence[int], specs: Sequence[Spec], *, force: bool = False
    ) -> HostBytes:
        """See :meth:`Tier.take`. With ``force``, also over the budget."""
        place = self.pool.take(sizes, owner, force=force)
        if specs != place.specs:  # else the same as in the last step, and shaped already
            with torch.inference_mode(False):
                views = zip(place.views, specs, strict=True)
                place.tensors = [view.view(dtype).view(shape) for view, (shape, dtype) in views]
            place.specs = specs  # last, for an interrupt
        return place
