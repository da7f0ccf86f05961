"""One rank of a virtual pipeline: its actions in order, and what they cost.

rank.begin_step(begin_s)
while rank.may_go_on:
    rank.run_next()
rank.ended().waits_most_for
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from pp_offload._megatron.manager import PipelineOffloadManager
from pp_offload.pipelining import Action
from pp_offload.simulate.device import VirtualBackend
from pp_offload.simulate.messages import Message, Messages
from pp_offload.simulate.orders import BACKWARDS, PipelineOrder
from pp_offload.simulate.stages import RankWork


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """What a step cost one rank."""

    seconds: float
    """From the begin of the step, which is that of all ranks, until its compute had ended."""

    busy_s: float
    """How long its compute worked."""

    stalled_s: float
    """How long work that was launched waited for copies."""

    waited_s: dict[int, float]
    """How long compute waited for messages of other ranks, by rank."""

    peak_bytes: int
    """Of its device; parameters and gradients count."""

    host_peak_bytes: int
    """The most of its host memory that saved tensors needed, in any step so far."""

    bytes_offloaded: int
    """Copied to the host."""

    on_demand_reloads: int
    """Payloads that came only when backward was at their group."""

    offload_s: float
    """How long these copies took, without what they waited for."""

    num_in_flight: int
    """The most forwards whose backward, or its last part, was to come."""

    bounds: tuple[int, int]
    """On bytes in flight, and on what is ahead, as the engine had them at the end."""

    @property
    def waits_most_for(self) -> int | None:
        """The rank whose messages it waited for longest; None if it never waited."""
        waited = {rank: seconds for rank, seconds in self.waited_s.items() if seconds > 0}
        return max(waited, key=waited.__getitem__) if waited else None


@dataclass(frozen=True)
class PipelineStep:
    """What a step cost."""

    ranks: list[RankStep]
    """In order."""

    @property
    def seconds(self) -> float:
        """Until the last rank had ended."""
        return max(rank.seconds for rank in self.ranks)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which compute did nothing."""
        busy_s, all_s = sum(rank.busy_s for rank in self.ranks), self.seconds * len(self.ranks)
        return 1 - busy_s / all_s if all_s else 0.0


class VirtualRank:
    """A rank at its work.

    Args:
        order: Has its actions.
        number: Which rank.
        manager: Of its own. It is in use while something is run.
        backend: The manager's.
        work: What its actions do.
        messages: To and from the others.
    """

    def __init__(
        self,
        order: PipelineOrder,
        number: int,
        manager: PipelineOffloadManager,
        backend: VirtualBackend,
        work: RankWork,
        messages: Messages,
    ) -> None:
        self.manager = manager
        self.backend = backend
        self._number = number
        self._actions = order.actions[number]
        self._work = work
        self._messages = messages
        self._next = len(self._actions)
        self._count = _Count(backend, manager)

    def begin_step(self, begin_s: float) -> None:
        """From the first action again, at that time."""
        self.backend.host.wait_until(begin_s)
        self._work.begin_step()
        self._next = 0
        self._count = _Count(self.backend, self.manager)

    @property
    def has_more(self) -> bool:
        """Whether the step has further actions."""
        return self._next < len(self._actions)

    @property
    def may_go_on(self) -> bool:
        """Whether there is one more, and what it needs."""
        if not self.has_more:
            return False
        needed = self._messages.needed_by(*self._actions[self._next])
        return needed is None or self._messages.is_there(needed)

    def run_next(self) -> None:
        """One action, and what goes before and after it."""
        action = self._actions[self._next]
        self._next += 1
        needed = self._messages.needed_by(*action)
        if needed is not None:
            self._receive(needed)
        nbytes = self._run(action)
        self._count.note(action)
        made = self._messages.made_by(*action)
        if made is not None:
            self._send(action, made, nbytes)
        if not self.has_more:
            self._work.update()

    def ended(self) -> RankStep:
        """What the step cost, when all actions are over."""
        return self._count.ended()

    def _run(self, action: Action) -> int:
        kind, stage, microbatch = action
        if kind == "FORWARD":
            return self._work.forward(stage, microbatch)
        if kind in BACKWARDS:
            return self._work.backward(kind, stage, microbatch)
        if kind == "BACKWARD_WEIGHT":
            self._work.weight(stage, microbatch)
        else:
            self._work.reduce(stage)
        return 0

    def _receive(self, message: Message) -> None:
        waited_s = self._messages.receive(message, self.backend)
        if message.sender != self._number:
            self._count.waited_s[message.sender] += waited_s

    def _send(self, action: Action, message: Message, nbytes: int) -> None:
        if self._messages.sends(message, self.backend, nbytes):
            return
        self._work.hand_over(*action)


class _Count:
    """What a step cost, from now on."""

    def __init__(self, backend: VirtualBackend, manager: PipelineOffloadManager) -> None:
        self.waited_s: defaultdict[int, float] = defaultdict(float)
        self._backend = backend
        self._manager = manager
        self._begin_s = backend.host.now_s
        self._busy_s = backend.compute.busy_s
        self._stalled_s = backend.compute.stalled_s
        self._copied_s = backend.offload_s
        self._before = manager.statistics()
        self._in_flight = self._most_in_flight = 0
        backend.memory.take_peak()

    def note(self, action: Action) -> None:
        """It was run."""
        self._in_flight += action.kind == "FORWARD"
        self._in_flight -= action.kind in ("FULL_BACKWARD", "BACKWARD_WEIGHT")
        self._most_in_flight = max(self._most_in_flight, self._in_flight)

    def ended(self) -> RankStep:
        """Until now."""
        compute, statistics = self._backend.compute, self._manager.statistics()
        stalled_s = compute.stalled_s - self._stalled_s
        return RankStep(
            seconds=compute.free_at_s - self._begin_s,
            busy_s=compute.busy_s - self._busy_s,
            stalled_s=max(0.0, stalled_s - sum(self.waited_s.values())),
            waited_s=dict(self.waited_s),
            peak_bytes=self._backend.memory.peak_bytes,
            host_peak_bytes=statistics.host_bytes_peak,
            bytes_offloaded=statistics.bytes_offloaded - self._before.bytes_offloaded,
            on_demand_reloads=statistics.on_demand_reloads - self._before.on_demand_reloads,
            offload_s=self._backend.offload_s - self._copied_s,
            num_in_flight=self._most_in_flight,
            bounds=self._manager.bounds.now,
        )
