"""The engine's rules on numbers: what leaves, what waits for what, and what comes back when.

Each method does what the one of the engine does that it names; only bytes and times are moved. A
run of both on the same tapes tells whether they still agree (tests/plan).

    rules = Rules(Transfer(copies, tiers), bounds, keys, uses)
    rules.close(chunk, position, keeps=False)
    rules.use(chunk, payload)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress

from pp_offload._groups.split_backward import BackwardPass
from pp_offload._policy.plan import ChunkKey, WeightPassKey
from pp_offload._steps.chunk_queue import Key
from pp_offload.plan.bounds import Bounds
from pp_offload.plan.chunks import ChunkState, CopyIndex, Held, Saved
from pp_offload.plan.parts import PartUses, RunningPart, WeightState
from pp_offload.plan.prefetch import Prefetcher
from pp_offload.plan.queue import BackwardQueue
from pp_offload.plan.transfer import Transfer


class Rules:
    """One rank's engine.

    Args:
        transfer: Moves payloads.
        bounds: On what is ahead.
        order: Chunks in backward order, and second parts.
        uses: What parts of backwards use.

    Attributes:
        copies: To the host and back.
        queue: Of chunks whose backward is to come.
    """

    def __init__(
        self, transfer: Transfer, bounds: Bounds, order: Sequence[Key], uses: PartUses
    ) -> None:
        self.copies = transfer.copies
        self.queue = BackwardQueue(order)
        self._transfer = transfer
        self._memory = self.copies.device.memory
        self._prefetcher = Prefetcher(transfer, self.queue, bounds.window)
        self._index = CopyIndex()
        self._uses = uses
        self._part: RunningPart | None = None
        self._weights: dict[ChunkKey, WeightState] = {}
        self._kept: defaultdict[ChunkKey, dict[int, Held]] = defaultdict(dict)

    # Forward

    def open(self, chunk: ChunkState, position: int) -> None:
        """As ``StepRecord.add``: with its first group, a chunk is queued."""
        if position == 0:
            self.queue.push(chunk)
            if chunk.key in self._uses.chunks:
                self._weights[chunk.key] = WeightState(chunk, self._uses)
                self.queue.push(self._weights[chunk.key])

    def is_next(self, chunk: ChunkState) -> bool:
        """As ``StepRecord.is_next``."""
        return next(self.queue.certain(), None) is chunk

    def close(self, chunk: ChunkState, position: int, *, keeps: bool) -> None:
        """A group is committed: it leaves, or stays."""
        saved = [chunk.saved[index] for index in chunk.tape.groups[position].payloads]
        if keeps:
            for one in saved:
                one.stay()
            return
        self._prefetcher.expect(sum([one.nbytes for one in saved]))
        with suppress(MemoryError):
            self._move(chunk, position, saved)
            return
        for one in reversed(saved):  # there is no room; as a list of tickets goes, last one first
            one.stay()

    def _move(self, chunk: ChunkState, position: int, saved: list[Saved]) -> None:
        """As ``Offloader.move``."""
        new = self._index.share(saved)
        if new:
            self.copies.watch.left(chunk.key, position, self._transfer.offload(new))
        self._index.add(new)
        chunk.groups[position].sent = saved
        self._uses.follow(chunk.key, saved)

    # Backward

    def begin_backward(self, key: ChunkKey) -> None:
        """As ``StepRecord.begin_backward``."""
        self.queue.begin(key)

    def begin_part(self, chunk: ChunkState, part: BackwardPass) -> None:
        """As ``Manager.backward_pass``, when it is entered."""
        self._part = RunningPart(chunk, part, self._uses, self._kept[chunk.key])
        if not self._part.is_second:
            self.begin_backward(chunk.key)
            return
        self.queue.begin(WeightPassKey(chunk.key))
        self._prefetcher.second = self._weights[chunk.key]
        self._prefetcher.resume(chunk, chunk.groups[-1])

    def end_part(self) -> None:
        """As the same, when it is left."""
        assert self._part is not None, "begin_part() comes first"
        for held in self._part.end():
            held.let_go(self._memory)
        self._part = self._prefetcher.second = None
        self._prefetcher.change()

    def use(self, chunk: ChunkState, index: int) -> None:
        """As ``SavedActivation.unpack``."""
        one, group = chunk.saved[index], chunk.group_of[index]
        if not group.is_used:
            self.copies.watch.reached(chunk.key, group.position)
            self._prefetcher.on_use(chunk, group)
        elif one.has_left and one.arrival is None:
            self._prefetcher.on_use(chunk, group)
        if not one.has_left:
            return
        if self._part is None:
            self._deliver(one)
        else:
            self._deliver_to(self._part, one)

    def release(self, chunk: ChunkState, index: int, use: int) -> None:
        """Backward has let go of what it was given for a use."""
        one = chunk.saved[index]
        if one.has_left:
            held, one.given[use] = one.given[use], None
            assert held is not None, "it is let go of once"
            held.let_go(self._memory)

    def gone(self, chunk: ChunkState, index: int) -> None:
        """Autograd holds it no more."""
        one = chunk.saved[index]
        one.is_gone = True
        if not one.has_left:
            one.source.let_go(self._memory)
            return
        if one.arrival is not None:
            self._transfer.reloads.forget(one)
        one.block = None

    def drop(self, chunk: ChunkState, source: int) -> None:
        """The program has let go of what was saved."""
        chunk.sources[source].let_go(self._memory)

    def _deliver_to(self, part: RunningPart, one: Saved) -> None:
        """As ``SplitBackward.deliver``."""
        for held in part.note(one.index):
            held.let_go(self._memory)
        kept = part.kept(one.index)
        if kept is not None:
            one.give(kept)
            return
        self._deliver(one)
        given = one.given[-1]
        assert given is not None, "it was given just now"
        for before in part.keep(one.index, given):
            before.let_go(self._memory)

    def _deliver(self, one: Saved) -> None:
        """As ``TransferEngine.deliver``."""
        transfer = self._transfer
        if transfer.is_bringing:
            transfer.poll()
        if one.memory is None:
            source = one.source_in_flight
            if source is not None:
                self._take_back(one, source)
                return
            transfer.load_now(one)
        assert one.block is not None and one.arrival is not None and one.memory is not None
        if not one.arrival.is_there:
            self.copies.wait_for(one.arrival)
        one.give(one.memory)
        if one.used() <= 0:
            if one.block.shared:
                transfer.reloads.pass_on(one, self._prefetcher.comes_soon)
            transfer.reloads.give_up(one)
        self.copies.watch.used(one.nbytes, one.num_waiting, one.spec.num_uses)
        self._prefetcher.refill()

    def _take_back(self, one: Saved, source: Held) -> None:
        self.copies.moved.taken_back += 1
        one.used()
        one.give(source)
        self._prefetcher.refill()
