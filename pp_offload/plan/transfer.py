"""The transfer engine in numbers; see :mod:`pp_offload._transfer.engine`.

transfer = Transfer(copies, places.tiers(copies, begin_s=0.0))
transfer.offload(saved)                # at the end of a group's forward
transfer.reload(saved, is_ahead=True)  # some time before its backward
transfer.load_now(one)                 # when backward asks
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress

from pp_offload._memory.buffers import room_for
from pp_offload._memory.unfinished import when_finished
from pp_offload._transfer.outgoing import PACK_BYTES
from pp_offload.plan.chunks import Block, Saved
from pp_offload.plan.copies import Copies
from pp_offload.plan.disk import Disk, DiskBlock
from pp_offload.plan.host import NumberTier


class Transfer:
    """Moves payloads off the device and back.

    Args:
        copies: Queues them.
        tiers: Where they go: to the first with room.

    Attributes:
        copies: See above.
        reloads: What is on the device again, or on its way there.
    """

    def __init__(self, copies: Copies, tiers: Sequence[NumberTier]) -> None:
        self.copies = copies
        self.reloads = copies.reloads
        self._tiers = tiers
        self._disks = [tier for tier in tiers if isinstance(tier, Disk)]

    def offload(self, saved: Sequence[Saved]) -> int:
        """Queue the copies of a group; how many bytes.

        Raises:
            MemoryError: There is no room for the rest of it.
        """
        nbytes, copies = self._send(saved), self.copies
        copies.in_flight.bound.expect(nbytes)
        copies.in_flight.keep_bounded(nbytes, self.poll)
        self.reloads.keep_few_abandoned()
        return nbytes

    def _send(self, saved: Sequence[Saved]) -> int:
        """As ``send`` of ``outgoing.py``."""
        if not self._disks:
            return self._send_to_host(saved)
        nbytes = 0
        gathered: dict[NumberTier, tuple[list[Saved], list[Block]]] = {}
        for batch, room in packs(saved):
            tier, blocks = when_finished(nullcontext(), self._place, batch, room)
            if tier.is_gathering:
                found, known = gathered.setdefault(tier, ([], []))
                found += batch
                known += blocks
            else:
                nbytes += tier.store(batch, blocks)
        for tier, (found, known) in gathered.items():
            nbytes += tier.store(found, known)
        return nbytes

    def _send_to_host(self, saved: Sequence[Saved]) -> int:
        """The same where nothing can be waited for, and there is no other tier: faster."""
        (host,) = self._tiers
        blocks: list[Block] = []
        for batch, room in packs(saved):
            self.poll()
            blocks += host.allocate(batch, room)
        return host.store(saved, blocks)

    def _place(self, batch: list[Saved], room: int) -> tuple[NumberTier, list[Block]]:
        self.poll()
        *others, last = self._tiers
        for tier in others:
            with suppress(MemoryError):  # then the next one is asked
                return tier, tier.allocate(batch, room)
        return last, last.allocate(batch, room)

    def reload(self, saved: Sequence[Saved], *, is_ahead: bool) -> None:
        """Begin to bring payloads back."""
        self.poll()
        num, moved = self._begin_to_load(saved), self.copies.moved
        if is_ahead:
            moved.prefetched_reloads += num
        else:
            moved.on_demand_reloads += num

    def _begin_to_load(self, saved: Sequence[Saved]) -> int:
        if len(self._tiers) == 1:
            return self._tiers[0].load(saved, is_ahead=True)
        by_tier: dict[NumberTier, list[Saved]] = {tier: [] for tier in self._tiers}
        for one in saved:
            by_tier[self._tier_of(one)].append(one)
        return sum([tier.load(some, is_ahead=True) for tier, some in by_tier.items() if some])

    def _tier_of(self, one: Saved) -> NumberTier:
        return self._tiers[-1 if isinstance(one.block, DiskBlock) else 0]

    def load_now(self, one: Saved) -> None:
        """Queue the reload of one that is not on the device."""
        if self._disks:
            when_finished(nullcontext(), self._load_now, one)
        else:
            self._load_now(one)

    def _load_now(self, one: Saved) -> None:
        is_expected = one.arrival is not None
        self.poll()  # which may bring it
        if one.memory is None:
            num = self._tier_of(one).load([one], is_ahead=False)
            self.copies.moved.on_demand_reloads += num * (not is_expected)

    @property
    def is_bringing(self) -> bool:
        """Whether something that was read ahead goes on to the device only in :meth:`poll`."""
        return bool(self._disks) and any(disk.is_bringing for disk in self._disks)

    def poll(self) -> None:
        """Let go of what finished copies kept alive, and go on with what has come."""
        self.copies.poll()
        for disk in self._disks:
            disk.poll()


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
