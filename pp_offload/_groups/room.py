"""How many groups may stay below a limit of device memory, as steps show it.

    room = DeviceRoom(wiring, config, step.in_flight)
    room.begin_step()
    ...
    room.end_step(step.shapes())
    room.stay  # for the next plan

At first all groups leave, and the device says what that takes. Bounds on what is on its way come
first: a step in which compute waits for copies is worse than one in which more of them run. What
they have left of the limit is filled. As what stays now was on its way before, it was counted
twice; so there may be room again, and it is filled a few times more.

NOTE [ What a peak does not say ]
    A device tells the peak since somebody has reset that, and many programs do so between steps. So
    it is also asked for when a backward goes on to another chunk, for memory is high then. And an
    optimizer makes its states when the first step is over. So that one only says what its groups
    are like, and so does one that asks for more than all before.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pp_offload._groups.fitting import Demand, InFlight, fitting
from pp_offload._groups.group import Group
from pp_offload._groups.plan import ChunkKey, ChunkShape, GroupKey, Place
from pp_offload._groups.wiring import Wiring
from pp_offload._transfer.listeners import Listener
from pp_offload._transfer.ticket import Owner, Ticket
from pp_offload.config import AUTO, OffloadConfig

logger = logging.getLogger(__name__)

NUM_FILLED = 8
"""So often more may stay than before."""

NUM_SETTLING = 3
"""Steps before that, in which bounds are chosen from times: see ``auto_bounds.NUM_TIMED``."""

SHARE_OF_UNUSED = 0.8
"""Of the device's unused memory, where no limit is given: an allocator leaves gaps."""

GIB = 2**30


@dataclass
class Seen:
    """What a step has shown so far."""

    peak_bytes: int = 0
    begun: set[ChunkKey] = field(default_factory=set)
    in_flight: set[InFlight] = field(default_factory=set)
    beside: dict[Place, int] = field(default_factory=dict)
    leaving: dict[int, int] = field(default_factory=dict)
    """By thread, of the group that is being committed there, as ``beside``."""

    in_backward: ChunkKey | None = None


class DeviceRoom(Listener):
    """Watches steps, and fills what the limit leaves.

    Args:
        wiring: Has the device, which is asked; how much moves at a time; and the plan.
        config: Has the limit. Nothing is watched unless its plan is ``"auto"``.
        in_flight: Counts the chunks of each stage whose backward is not over.
    """

    def __init__(
        self, wiring: Wiring, config: OffloadConfig, in_flight: Callable[[], InFlight]
    ) -> None:
        self._stay: frozenset[Place] = frozenset()
        self._wiring = wiring
        self._in_flight = in_flight
        self._is_wanted = config.plan == AUTO
        self._limit_bytes = config.device_limit_bytes
        self._demand = Demand()
        self._before: frozenset[Place] = frozenset()
        self._num_left = NUM_SETTLING + NUM_FILLED
        self._foreseen_bytes: int | None = None
        self._seen: Seen | None = None

    @property
    def stay(self) -> frozenset[tuple[Place, int]]:
        """Places of groups that are to stay, and the most bytes that they may have for that."""
        return frozenset((place, self._demand.sizes[place]) for place in self._stay)

    def begin_step(self) -> None:
        """Watch a step."""
        if not self._is_wanted:
            return
        if self._wiring.transfer.backend.allocated() is None:
            self._is_wanted = False
            logger.warning(
                "plan is %r, but %s does not tell what is allocated: all groups leave; name a plan "
                "that was made before, or leave the option out",
                AUTO,
                self._wiring.transfer.backend.name,
            )
            return
        self._seen = Seen()
        self._wiring.transfer.listeners.add(self)

    def group_opened(self, group: Owner) -> None:
        """With the first one of a chunk, one more is in flight."""
        seen, key = self._seen, _key_of(group)
        if seen is not None and key is not None and key.chunk not in seen.begun:
            seen.begun.add(key.chunk)
            now = self._in_flight()
            seen.in_flight.add(now)
            if self._stay and not self._demand.covers(now):  # for so many there is no room
                self._wiring.plan = self._wiring.plan.without_room()

    def leaving(self, tickets: Sequence[Ticket]) -> None:
        """A group that stays holds storages whole, also where it has saved parts of them."""
        if self._seen is not None:
            held = {ticket.payload.untyped_storage() for ticket in tickets}
            nbytes = sum([storage.nbytes() for storage in held])
            more = nbytes - sum([ticket.nbytes for ticket in tickets])
            self._seen.leaving[threading.get_ident()] = max(0, more)

    def group_closed(self, group: Owner) -> None:
        """What was left out of its storages is known now, and whose they are."""
        seen, key = self._seen, _key_of(group)
        if seen is not None and key is not None:
            nbytes = seen.leaving.pop(threading.get_ident(), 0)
            place = Place(key.chunk.vp_stage, key.position)
            seen.beside[place] = max(seen.beside.get(place, 0), nbytes)

    def group_reached(self, group: Owner) -> None:
        """With the first one of a chunk, see NOTE [ What a peak does not say ]."""
        seen, key = self._seen, _key_of(group)
        if seen is None or key is None or not self._num_left:
            return
        if key.chunk != seen.in_backward:
            seen.in_backward = key.chunk
            seen.peak_bytes = max(seen.peak_bytes, self._peak_now())

    def end_step(self, chunks: Sequence[ChunkShape] | None) -> None:
        """The step is over.

        Args:
            chunks: What it was like; None if it says nothing of others.
        """
        seen, self._seen = self._seen, None
        if seen is None:
            return
        self._wiring.transfer.listeners.remove(self)
        if chunks is None:
            return
        demand = self._demand.with_step(chunks, seen.beside, seen.in_flight)
        if demand != self._demand:
            self._demand, self._num_left = demand, NUM_SETTLING + NUM_FILLED
            self._stay = self._before = frozenset()
        if self._num_left:
            self._num_left -= 1
            self._foreseen_bytes = max(seen.peak_bytes, self._peak_now())
            if self._num_left < NUM_FILLED:
                self._fill(self._foreseen_bytes)

    def _fill(self, peak_bytes: int) -> None:
        """As much more as fits, after a step that took so much."""
        limit_bytes = self._limit(peak_bytes)
        if peak_bytes > limit_bytes:
            self._num_left = 0
            self._go_back(peak_bytes, limit_bytes)
            return
        moving_bytes = self._moving_bytes()
        found = fitting(self._demand, limit_bytes - peak_bytes, moving_bytes, self._stay)
        more_bytes = self._demand.nbytes(found - self._stay)
        self._foreseen_bytes = peak_bytes + more_bytes + moving_bytes
        if found == self._stay:
            self._num_left = 0
        self._before, self._stay = self._stay, found
        logger.info(
            "the device took %.2f GiB of %.2f; %d of %d groups of a microbatch stay from now on, "
            "for at most %.2f GiB more",
            peak_bytes / GIB,
            limit_bytes / GIB,
            len(found),
            len(self._demand.sizes),
            more_bytes / GIB,
        )

    def _moving_bytes(self) -> int:
        """What bounds let be on its way, both ways together. A group is not cut by one."""
        largest = max(self._demand.sizes.values(), default=0)
        cap_bytes = self._wiring.transfer.copies.in_flight.bound.nbytes
        return max(cap_bytes, largest) + max(self._wiring.prefetcher.window.nbytes, largest)

    def _go_back(self, peak_bytes: int, limit_bytes: int) -> None:
        logger.warning(
            "the device took %d bytes, expected at most device_limit_bytes, which is %d: %s",
            peak_bytes,
            limit_bytes,
            "fewer groups stay from now on"
            if self._stay
            else "all groups leave; have more of the model in groups, recompute layers, or make "
            "microbatches shorter",
        )
        self._stay = self._before

    def _limit(self, peak_bytes: int) -> int:
        if self._limit_bytes is None:
            unused_bytes = self._wiring.transfer.backend.unused_bytes() or 0
            self._limit_bytes = peak_bytes + int(unused_bytes * SHARE_OF_UNUSED)
        return self._limit_bytes

    def _peak_now(self) -> int:
        allocated = self._wiring.transfer.backend.allocated()
        return 0 if allocated is None else allocated.peak_bytes

    def unused_bytes(self) -> int | None:
        """What bounds may grow into, of the device and the limit; None where there is no end."""
        unused_bytes = self._wiring.transfer.backend.unused_bytes()
        if self._limit_bytes is None or self._foreseen_bytes is None:
            return unused_bytes
        left_bytes = max(0, self._limit_bytes - self._foreseen_bytes)
        return left_bytes if unused_bytes is None else min(left_bytes, unused_bytes)


def _key_of(group: Owner) -> GroupKey | None:
    """Of what has none, such as a stash, nothing is planned."""
    return group.key if isinstance(group, Group) else None
