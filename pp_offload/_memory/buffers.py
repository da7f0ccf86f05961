"""Host memory in one piece or several, shaped for the payloads it holds.

places = buffer.shaped([(torch.Size((12, 20)), torch.float32)])
loan = Loan(buffer)   # what its owner keeps
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pp_offload._common.torch_private import disable_current_modes
from pp_offload._memory.arena import Range
from pp_offload._memory.slabs import Slab, owned_by
from pp_offload.backends import Event

PART_ALIGNMENT = 64
"""Alignment of parts in a buffer, in bytes."""

Spec = tuple[torch.Size, torch.dtype]
"""A contiguous tensor that a buffer is to hold."""

Place = tuple[int, Tensor]
"""A first byte in the buffer, and the tensor there."""


class HostBuffer:
    """Host memory in one piece or several, and the copies that used it last.

    Attributes:
        last_use: The end of the copy, or of the read from disk, that used it last.
        before: The ends of other uses of the same memory, until something has waited for them: of
            copies under way when it was carved, and of a thread that writes it to disk.
    """

    __slots__ = (
        "_shape",
        "_slabs",
        "before",
        "last_use",
        "nbytes",
        "num_payloads",
        "pieces",
        "ranges",
        "room_bytes",
    )

    def __init__(self, nbytes: int, ranges: list[Range], slabs: list[Slab]) -> None:
        self.nbytes = nbytes
        self.num_payloads = 1
        self.ranges = ranges
        self.room_bytes = sum(one.nbytes for one in ranges)
        self.pieces: list[Tensor] = []
        self.last_use: Event | None = None
        self.before: tuple[Event, ...] = ()
        self._slabs = [slabs[one.slab] for one in ranges]
        left = nbytes
        for one, slab in zip(ranges, self._slabs, strict=True):
            self.pieces.append(slab.data[one.offset : one.offset + min(left, one.nbytes)])
            left -= one.nbytes
        self._shape: tuple[list[Spec], list[Place]] = [], []

    def is_idle(self) -> bool:
        """Whether its last uses have ended."""
        if self.last_use is not None and not self.last_use.query():
            return False
        return not self.before or all(event.query() for event in self.before)

    def last_uses(self) -> Iterator[Event]:
        """Events that must have ended before the memory is written."""
        yield from self.before
        if self.last_use is not None:
            yield self.last_use

    def shaped(self, parts: list[Spec]) -> list[Place]:
        """Where contiguous tensors lie, one behind the other. Made once for the same parts.

        A tensor that no single piece holds is on the ``meta`` device, without bytes.
        """
        if self._shape[0] != parts:
            self._shape = parts, list(self._placed(parts))
        return self._shape[1]

    def _placed(self, parts: list[Spec]) -> Iterator[Place]:
        begin = 0
        for size, dtype in parts:
            nbytes = size.numel() * dtype.itemsize
            held = self.bytes_at(begin, nbytes)
            if len(held) == 1:
                yield begin, held[0].view(dtype).view(size)
            else:
                yield begin, no_address(size, dtype)
            begin += room_for(nbytes)

    def bytes_at(self, begin: int, nbytes: int) -> list[Tensor]:
        """The ``nbytes`` from byte ``begin`` on, as flat ``uint8`` tensors."""
        held: list[Tensor] = []
        for piece in self.pieces:
            if begin < piece.numel() and nbytes > 0:
                held.append(piece[begin : begin + nbytes])
                nbytes -= held[-1].numel()
            begin = max(0, begin - piece.numel())
        return held


class Loan:
    """A buffer for as long as anybody refers to this object; then others may have it."""

    __slots__ = ("__weakref__", "buffer")

    def __init__(self, buffer: HostBuffer) -> None:
        self.buffer = buffer

    @property
    def nbytes(self) -> int:
        """Bytes that were asked for."""
        return self.buffer.nbytes


def as_tensor(loan: Loan) -> Tensor:
    """The buffer of a loan as a flat ``uint8`` tensor, whose storage alone keeps the loan.

    So the user may keep the tensor, any view of it, or none. The buffer has to be in one piece.
    """
    (piece,) = loan.buffer.pieces
    return owned_by(loan, piece)


def no_address(size: torch.Size, dtype: torch.dtype) -> Tensor:
    """The place of a tensor that is in no single piece. No mode sees it: it is no device memory."""
    with disable_current_modes():
        return torch.empty(size, dtype=dtype, device="meta")


def in_shape(place: Tensor, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """The place of a tensor of another shape and dtype that has the same bytes."""
    return no_address(size, dtype) if place.is_meta else place.view(dtype).view(size)


def room_for(nbytes: int) -> int:
    """Bytes that a part of ``nbytes`` takes in a buffer that holds several."""
    return -(-nbytes // PART_ALIGNMENT) * PART_ALIGNMENT
