"""The transfer engine: asks tiers for what autograd's saved tensors need.

Tiers know where bytes are; ``copies.py`` knows in which order they move.

NOTE [ One lock ]
    Backwards may run in any number of threads, beside forwards. One lock guards what the engine
    and its tiers know, and what groups, steps and prefetch know of them. It is held for bookkeeping
    and never during a wait: neither while compute waits, which blocks the thread where the device
    is the host, nor while the host waits for copies or threads. So what is waited for stays
    registered until the wait is over. Code that would have to wait under the lock changes nothing
    and raises ``Unfinished``; its caller gives up the lock, waits, and calls it again.

NOTE [ Harm while queued ]
    A source changed in place before its copy has run would be copied wrong. So its version counter
    is compared when the source is let go, and when somebody wants the bytes before that. Its
    address is compared, too: whoever empties a storage with ``resize_(0)`` gives its memory to
    others at once, whatever still reads it, and may fill it again elsewhere before anybody looks.

    transfer.offload(tickets)                # at the end of a group's forward
    transfer.reload(tickets, is_ahead=True)  # some time before its backward
    tensor = transfer.deliver(ticket)        # when autograd asks
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from torch import Tensor

from pp_offload._common.processes import HERE, check
from pp_offload._memory.unfinished import when_finished
from pp_offload._transfer.block import Block, Harm
from pp_offload._transfer.copies import Copies
from pp_offload._transfer.counters import TransferCounters
from pp_offload._transfer.in_flight import PendingOffload
from pp_offload._transfer.outgoing import send
from pp_offload._transfer.pending_reloads import shaped_for
from pp_offload._transfer.ticket import Arrival, Reload, Ticket
from pp_offload._transfer.tier import Tier
from pp_offload.backends import Stream
from pp_offload.errors import (
    NotWhileCapturingError,
    OffloadError,
    SavedTensorModifiedError,
    TierError,
)

logger = logging.getLogger(__name__)


class TransferEngine:
    """Moves payloads off the device and back, over tiers.

    Args:
        copies: Queues copies between the device and host memory.
        tiers: Where the bytes go: to the first with room.

    Attributes:
        backend: The device.
        lock: See NOTE [ One lock ].
        listeners: Told what happens; see NOTE [ Where listeners are called ].
        counters: One of the listeners; it counts what was moved.
        reloads: What is on the device again, or on its way there.
        owner: The process that made it.
    """

    def __init__(self, copies: Copies, tiers: Sequence[Tier]) -> None:
        self.copies = copies
        self.tiers = tuple(tiers)
        self.backend = copies.backend
        self.lock = copies.lock
        self.listeners = copies.listeners
        self.counters = TransferCounters()
        self.listeners.add(self.counters)
        self.reloads = copies.reloads
        self._off_streams = [tier for tier in self.tiers if not tier.may_capture()]
        self.owner = HERE[0]

    def check_process(self) -> None:
        """Only the process that made the engine may use it: copies and files do not follow a fork.

        Raises:
            ForkedError: This is another process.
        """
        check(self.owner, "what was offloaded")

    # Off the device

    def offload(self, tickets: Sequence[Ticket]) -> int:
        """Queue the copies of a group to the tiers; its sources are kept alive until they have run.

        Not to be called with the lock held: a tier may have something to wait for.

        Args:
            tickets: At least one, none offloaded before.

        Returns:
            Bytes.

        Raises:
            MemoryError: No tier has room for the rest of it. Copies queued before are of no use;
                the sources are as before.
        """
        if self.owner != HERE[0]:  # before the lock, which a thread lost in a fork may hold
            self.check_process()
        if self._off_streams and self.backend.is_capturing:
            name = self._off_streams[0].name
            raise NotWhileCapturingError(f"writing to {name} cannot be part of a captured graph")
        nbytes = send(tickets, self.tiers, self.copies, self.poll)
        self.copies.in_flight.bound.expect(nbytes)
        self.keep_in_flight_bounded(nbytes)
        return nbytes

    def keep_in_flight_bounded(self, last_bytes: int) -> None:
        """Make compute wait for copies to the host until no more is in flight than may be.

        Not to be called with the lock held: it blocks where the device is the host.

        Args:
            last_bytes: Of the last offload, which is not waited for.
        """
        if self.copies.in_flight.queue:
            self.copies.in_flight.keep_bounded(last_bytes, self.poll)
        if self.reloads.abandoned:
            self.reloads.keep_few_abandoned(self.lock)

    def wait_up_to(self, last: PendingOffload) -> None:
        """Have compute wait for the copies to the host up to these; the lock is not held."""
        self.copies.in_flight.join(last)

    def after_copies(self, action: Callable[[], None]) -> None:
        """Run ``action`` when the sources of the copies queued so far have been let go."""
        with self.lock:
            self.poll()
            queue = self.copies.in_flight.queue
            if queue:
                queue[-1].then.append(action)
                return
        action()

    # Back to it

    def reload(self, tickets: Sequence[Ticket], *, is_ahead: bool = False) -> int:
        """Begin to bring payloads back, which hold their data once :meth:`deliver` returns them.

        Never waits.

        Args:
            tickets: At least one; some may have come already.
            is_ahead: Whether backward has not reached them yet, as listeners are told.

        Returns:
            How many payloads are on their way; those that share bytes count once.
        """
        self.check_process()  # before the lock, which a thread lost in a fork may hold
        if self._off_streams and self.backend.is_capturing:
            self._refuse_to_load(tickets)
        with self.lock:
            self.poll()  # which may bring some of them
            num = self._begin_to_load(tickets)
            for heard in self.listeners.reloads_queued:
                heard(num, is_ahead=is_ahead)
        return num

    def _begin_to_load(self, tickets: Sequence[Ticket]) -> int:
        if len(self.tiers) == 1:
            return self.tiers[0].load(tickets, is_ahead=True)
        by_tier: dict[Tier, list[Ticket]] = {tier: [] for tier in self.tiers}
        for ticket in tickets:
            by_tier[ticket.block.tier].append(ticket)
        num = 0
        for tier, there in by_tier.items():
            num += tier.load(there, is_ahead=True) if there else 0
        return num

    def _refuse_to_load(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            block = ticket.block
            if ticket.device_tensor is None and not block.tier.may_capture(block):
                raise NotWhileCapturingError(
                    f"reading from {block.tier.name} cannot be part of a captured graph; keep what "
                    'it needs in host memory, with tiers=("host",)'
                )

    def deliver(self, ticket: Ticket) -> Tensor:
        """The payload on the device, ready for the live compute stream.

        Reloads it now if nobody did before, or if it was reloaded for another stream: that one
        could use the memory again while the live stream still reads it. While the copy to the host
        has still to run, the source is there, and is taken back as it is. See NOTE [ One lock ].

        Raises:
            SavedTensorModifiedError: It was changed in place before it was copied.
            TierError: It cannot be brought back.
            VerifyError: It is not what left. Only with ``verify``.
            ForkedError: It was offloaded before this process was forked.
        """
        if self.owner != HERE[0]:
            self.check_process()
        if self._off_streams and any(tier.is_bringing for tier in self._off_streams):
            self.poll()
        live, found = self.backend.current_stream(), None
        with self.lock:
            block, reload = ticket.block, ticket.reload
            if ticket.begin in block.sources:
                block.check_sources((ticket.begin,))
            if block.harmed:
                self._check_unharmed(ticket, block)
            if reload is None:
                found = self._take_back(ticket, live)
            elif (at := reload.arrival) is not None and at.is_there and at.stream == live:
                found = self.reloads.take(ticket, reload, live)
        if found is None:
            found = self._deliver_late(ticket, live)
        for heard in self.listeners.delivered:
            heard(ticket, found)
        reloads = self.reloads
        if reloads.nbytes < reloads.refill_below_bytes:
            reloads.refill()
        return found

    def _deliver_late(self, ticket: Ticket, live: Stream) -> Tensor:
        """The payload, which has to be brought or waited for."""
        found = when_finished(self.lock, self._find, ticket, live)
        if isinstance(found, Tensor):
            return found
        reload, arrival = found
        try:
            self.copies.wait_once(live, arrival)
        except TierError as failure:
            return self._instead(ticket, live, failure)
        with self.lock:
            tensor = self.reloads.take(ticket, reload, live)
        if tensor is None:
            raise self._used_up(ticket)
        return tensor

    def _find(self, ticket: Ticket, live: Stream) -> Tensor | tuple[Reload, Arrival]:
        """The source, if it is taken back; else what compute has to wait for."""
        reload = ticket.reload
        if reload is not None and not self._is_good(reload, live):
            self.reloads.give_up(reload)
        if ticket.device_tensor is None:
            source = self._take_back(ticket, live)
            if source is not None:
                return source
            self._load_now(ticket)
        reload = ticket.reload
        if reload is None or reload.arrival is None:
            raise OffloadError(
                f"the tier '{ticket.block.tier.name}' was to load a payload of group "
                f"'{ticket.label}', and registered no device memory for it; its load() has to call "
                "Copies.reloads.begin, or raise a TierError"
            )
        return reload, reload.arrival

    def _take_back(self, ticket: Ticket, live: Stream) -> Tensor | None:
        """The source, if its copy has still to run and it belongs to the live stream."""
        held = ticket.block.sources.get(ticket.begin)
        if held is None or ticket.block.stream != live:
            return None
        for heard in self.listeners.taken_back:
            heard(ticket)
        left = ticket.num_waiting
        ticket.num_waiting = (left if left > 0 else ticket.num_members) - 1  # NOTE [ Uses ]
        return shaped_for(ticket, held[0]) if ticket.block.shared else held[0]

    def _load_now(self, ticket: Ticket) -> None:
        """Queue the reload of a ticket that is not on the device."""
        if self._off_streams and self.backend.is_capturing:
            self._refuse_to_load([ticket])
        is_expected = ticket.reload is not None
        self.poll()  # which may bring it
        if ticket.device_tensor is None:
            num = ticket.block.tier.load([ticket], is_ahead=False)
            for heard in () if is_expected else self.listeners.reloads_queued:
                heard(num, is_ahead=False)

    def _instead(self, ticket: Ticket, live: Stream, failure: TierError) -> Tensor:
        """Where the tier could not bring it back: its source, if it could not store it either."""
        with self.lock:
            self.copies.give_up([ticket])
            source = self._take_back(ticket, live)
            if source is None:
                raise failure
            return source

    @staticmethod
    def _is_good(reload: Reload, live: Stream) -> bool:
        """Whether it belongs to the live stream, no interrupt came before its event was known, and
        no backward that used it for another ticket has changed it in place.
        """
        if reload.arrival is None:
            return True  # a disk is being read; no stream is part of that yet
        return reload.is_for(live) and (reload.version is not None or reload.is_as_it_came)

    @staticmethod
    def _used_up(ticket: Ticket) -> SavedTensorModifiedError:
        """The error for a payload that one backward has changed in place and another asks for."""
        return SavedTensorModifiedError(
            f"one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of group '{ticket.label}' with payload shape "
            f"{tuple(ticket.host_bytes.shape)}, saved several times, was changed by a backward "
            "that used it before; use an out-of-place operation there"
        )

    @staticmethod
    def _check_unharmed(ticket: Ticket, block: Block) -> None:
        harm = block.harmed.get(ticket.begin)
        if harm is Harm.EMPTIED:
            raise OffloadError(
                f"the memory of a tensor of group '{ticket.label}' was given up by somebody else, "
                "with resize_() or share_memory_() on its storage, before its copy to the host was "
                "known to be made; expected it to stay until then; have compute wait for "
                "copies, with OffloadConfig(max_in_flight_bytes=0) or max_inflight_offloads=0"
            )
        if harm is Harm.CHANGED:
            raise SavedTensorModifiedError(
                f"a tensor of group '{ticket.label}' with payload shape "
                f"{tuple(ticket.host_bytes.shape)} was modified by an inplace operation after "
                "autograd saved it and before its bytes were copied; use an out-of-place operation "
                "there, or mark the tensor with mark_not_offloadable and see the error autograd "
                "raises for it"
            )

    # Now and then

    def poll(self) -> None:
        """Let go of what finished copies kept alive, and go on with what has come. Never blocks."""
        with self.lock:
            self.copies.poll()
            for tier in self._off_streams:
                tier.poll()

    def compact(self) -> None:
        """Between steps: make memory as tight as what the steps needed; waits for copies.

        Not to be called with the lock held. Does nothing inside a capture, where nobody can wait.
        """
        self._tidy(self.reloads.count, *[tier.compact for tier in self.tiers])

    def _tidy(self, *actions: Callable[[], None]) -> None:
        if self.backend.is_capturing:
            return

        def act() -> None:
            for action in (self.poll, *actions):
                action()

        try:
            when_finished(self.lock, act)
        except OffloadError:
            raise
        except Exception as failure:  # a copy that failed raises for whoever needs its bytes
            logger.debug("host memory stays as it is, for a copy failed: %s", str(failure))

    def release_idle(self) -> None:
        """Give memory back to the system that no saved tensor needs; waits for copies.

        Not to be called with the lock held. Does nothing inside a capture, where nobody can wait.
        """
        self._tidy(*[tier.release_idle for tier in self.tiers])

    def retire(self) -> None:
        """Another engine takes over: keep only what living saved tensors need."""
        self.release_idle()
        for tier in self.tiers:
            tier.retire()

    def __del__(self) -> None:
        """Wait for copies that may still use memory which goes with the engine.

        Not for all that is on their streams: garbage may be collected in the middle of a call of
        another engine on this very thread, which has yet to queue its part on the same stream.
        """
        with suppress(Exception):  # a copy that failed is over; at exit, the driver may be gone
            if not self.backend.is_capturing:
                for event in (*self.copies.in_flight.events(), *self.reloads.events()):
                    event.synchronize()

    def close(self) -> None:
        """Finish all copies, then drop what the tiers have."""
        self.backend.synchronize()
        self.poll()
        for tier in self.tiers:
            tier.close()
