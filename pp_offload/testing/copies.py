"""Queued copies: they keep nothing alive, and a target holds garbage until its copy runs.

On a device a queued copy does not own its tensors either, so a tensor freed too early must show.

    copy = QueuedCopy(WeakTensor(target), WeakTensor(source), "attn")
    copy.spoil_target()
    copy.run()  # some time later; raises RaceError if source or target is gone
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from pp_offload._common.torch_private import neg_view, no_dispatch
from pp_offload.errors import RaceError
from pp_offload.testing.happens_before import extent_of

POISON = 0xFF
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextmanager
def unwatched() -> Iterator[None]:
    """Hide the simulator's own operators from autograd and from dispatch modes."""
    with no_dispatch(), torch.no_grad():
        yield


class WeakTensor:
    """Place of a tensor, without keeping its storage alive."""

    def __init__(self, tensor: Tensor) -> None:
        self.extent = extent_of(tensor)
        self._storage = weakref.ref(tensor.untyped_storage())
        self._dtype = tensor.dtype
        self._geometry = (tensor.storage_offset(), tensor.size(), tensor.stride())
        self._is_conj, self._is_neg = tensor.is_conj(), tensor.is_neg()

    def rebuild(self) -> Tensor | None:
        """Make a tensor on the same bytes; None if the storage is gone or was emptied."""
        storage = self._storage()
        if storage is None or storage.nbytes() < self.extent.stop:
            return None
        tensor = torch.empty(0, dtype=self._dtype, device=storage.device)
        tensor.set_(storage, *self._geometry)
        tensor = neg_view(tensor) if self._is_neg else tensor
        return tensor.conj() if self._is_conj else tensor

    def overlaps(self, other: WeakTensor) -> bool:
        """Whether both tensors lie on the same storage and share a byte."""
        storage = self._storage()
        return (
            storage is not None
            and storage is other._storage()
            and self.extent.overlaps(other.extent)
        )


@dataclass(frozen=True)
class QueuedCopy:
    """Call of ``target.copy_(source)`` that has not run yet."""

    target: WeakTensor
    source: WeakTensor
    label: str
    """The group, for messages."""

    def touches(self, tensor: WeakTensor) -> bool:
        """Whether the copy reads or writes a byte of ``tensor``."""
        return tensor.overlaps(self.target) or tensor.overlaps(self.source)

    @unwatched()
    def spoil_target(self) -> None:
        """Set every byte of every element of the target to 0xFF, which is NaN for floats."""
        target = self.target.rebuild()
        if target is None or target.numel() == 0:
            return
        target = torch.view_as_real(target) if target.is_complex() else target
        integer = _INTEGERS[target.itemsize]
        target.view(integer).fill_(POISON if integer is torch.uint8 else -1)

    @unwatched()
    def run(self) -> None:
        """Run the copy.

        Raises:
            RaceError: Source or target was freed meanwhile.
        """
        target, source = self.target.rebuild(), self.source.rebuild()
        if target is None or source is None:
            side = "target" if target is None else "source"
            raise RaceError(
                f"the {side} of group {self.label!r} was freed before the copy ran; "
                "keep it alive until an event recorded after the copy has finished"
            )
        target.copy_(source)
