"""The transfer engine in numbers; see :mod:`pp_offload._transfer.engine`.

transfer = Transfer(Copies(device, bounds.cap, Moved(), Unwatched(device)), HostPlaces())
transfer.offload(saved)                # at the end of a group's forward
transfer.reload(saved, is_ahead=True)  # some time before its backward
transfer.load_now(one)                 # when backward asks
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pp_offload._memory.buffers import room_for
from pp_offload._transfer.outgoing import PACK_BYTES
from pp_offload.plan.chunks import Block, Saved
from pp_offload.plan.copies import Copies
from pp_offload.plan.host import HostPlaces


class Transfer:
    """Moves payloads off the device and back.

    Args:
        copies: Queues them.
        host: Where payloads go.

    Attributes:
        copies: See above.
        reloads: What is on the device again, or on its way there.
    """

    def __init__(self, copies: Copies, host: HostPlaces) -> None:
        self.copies = copies
        self.reloads = copies.reloads
        self._host = host

    def offload(self, saved: Sequence[Saved]) -> int:
        """Queue the copies of a group; how many bytes."""
        blocks = [self._place(batch, room) for batch, room in packs(saved)]
        copies = self.copies
        nbytes = copies.copy_to_host(saved, blocks)
        copies.in_flight.bound.expect(nbytes)
        copies.in_flight.keep_bounded(nbytes, self.poll)
        self.reloads.keep_few_abandoned()
        return nbytes

    def _place(self, batch: list[Saved], room: int) -> Block:
        self.poll()
        block = Block(self._host.allocate(room))
        begin = 0
        for one in batch:
            one.block, one.begin, one.has_left = block, begin, True
            block.placed.append(one)
            begin += room_for(one.nbytes)
        return block

    def reload(self, saved: Sequence[Saved], *, is_ahead: bool) -> None:
        """Begin to bring payloads back."""
        self.poll()
        num, moved = self.copies.copy_to_device(saved), self.copies.moved
        if is_ahead:
            moved.prefetched_reloads += num
        else:
            moved.on_demand_reloads += num

    def load_now(self, one: Saved) -> None:
        """Queue the reload of one that is not on the device."""
        self.reload([one], is_ahead=False)

    def poll(self) -> None:
        """Let go of what finished copies kept alive."""
        self.copies.poll()


def packs(saved: Sequence[Saved]) -> Iterator[tuple[list[Saved], int]]:
    """As those of ``outgoing.py``: small payloads share a block."""
    batch: list[Saved] = []
    room = 0
    for one in saved:
        if batch and room + one.nbytes > PACK_BYTES:
            yield batch, room if len(batch) > 1 else batch[0].nbytes
            batch, room = [], 0
        batch.append(one)
        room += room_for(one.nbytes)
    yield batch, room if len(batch) > 1 else batch[0].nbytes
