"""Run of all ranks of a pipeline in one process, each on a virtual device of its own.

    order = PipelineOrder(Schedule1F1B, num_ranks=4, num_stages=4, num_microbatches=16)
    work = Modules(stages, example=tokens, loss_fn=loss_fn)
    step = run_pipeline(order, work, DEVICES["H100"], config=OffloadConfig())
    step.seconds, step.ranks[0].peak_bytes, step.ranks[1].waits_most_for

NOTE [ Turns ]
    A rank runs its actions until it needs a message that was not sent yet; then another rank has
    its turn. Work receives its times when it is launched, and a rank depends on others only through
    the times of their messages. So the order of turns changes nothing, and all clocks share a time.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pp_offload._common.checks import check_count, check_kind
from pp_offload._common.processes import collector_off
from pp_offload._common.text import GB
from pp_offload._megatron.manager import PipelineOffloadManager, use_manager
from pp_offload._memory.budget import UNLIMITED, as_another_process
from pp_offload.config import OffloadConfig, check_config
from pp_offload.simulate.clocks import VirtualStream
from pp_offload.simulate.device import VirtualBackend
from pp_offload.simulate.hardware import Hardware, check_number
from pp_offload.simulate.schedules import BACKWARDS, PipelineOrder
from pp_offload.simulate.stages import RankWork, Work


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """Cost of a step on a rank."""

    seconds: float
    """Time from the begin of the step on all ranks until this rank's compute had ended."""

    busy_s: float
    """Time in which the rank's compute worked."""

    stalled_s: float
    """Time in which launched work waited for copies."""

    waited_s: dict[int, float]
    """Time in which compute waited for messages of other ranks, by rank."""

    peak_bytes: int
    """Device memory at the peak; parameters and gradients count."""

    host_peak_bytes: int
    """Host memory of saved tensors at the peak of any step so far."""

    bytes_offloaded: int
    """Bytes copied to the host."""

    on_demand_reloads: int
    """Payloads reloaded only when backward was at their group."""

    offload_s: float
    """Time of the copies to the host, without their waits."""

    num_in_flight: int
    """Most forwards at a time whose backward, or its last part, was pending."""

    bounds: tuple[int, int]
    """Bounds on bytes in flight, and on bytes ahead, at the end of the step."""

    @property
    def waits_most_for(self) -> int | None:
        """Rank whose messages this rank waited for longest; None if it never waited."""
        waited = {rank: seconds for rank, seconds in self.waited_s.items() if seconds > 0}
        return max(waited, key=waited.__getitem__) if waited else None


@dataclass(frozen=True)
class PipelineStep:
    """Cost of a step on all ranks."""

    ranks: list[RankStep]
    """Costs of the ranks, in order."""

    @property
    def seconds(self) -> float:
        """Time until the last rank ended."""
        return max(rank.seconds for rank in self.ranks)

    @property
    def bubble(self) -> float:
        """Share of all ranks' time in which compute did nothing."""
        busy_s, all_s = sum(rank.busy_s for rank in self.ranks), self.seconds * len(self.ranks)
        return 1 - busy_s / all_s if all_s else 0.0


@dataclass(frozen=True, kw_only=True)
class PeerLink:
    """Rates of messages between ranks, the same for each pair and direction.

    Raises:
        ValueError: The rate is not above 0, or the latency is below.
    """

    bytes_per_s: float = 50 * GB
    """Rate from a data sheet: 400 Gbit/s of network for each device."""

    latency_s: float = 10e-6
    """Time of a message, in addition to its bytes."""

    def __post_init__(self) -> None:
        check_number("bytes_per_s", self.bytes_per_s)
        check_number("latency_s", self.latency_s, may_be_zero=True)


class Message(NamedTuple):
    """Output or gradient that a stage makes for its neighbour."""

    is_gradient: bool
    stage: int  # that receives it
    microbatch: int
    sender: int
    receiver: int


class Messages:
    """All messages of a step, on a link for each pair of ranks."""

    def __init__(self, order: PipelineOrder, link: PeerLink) -> None:
        self._rank_of, self._link = order.rank_of, link
        self._streams: dict[tuple[int, int], VirtualStream] = {}
        self.arrives_s: dict[Message, float] = {}  # of each message made and not received

    def around(self, kind: str, stage: int, microbatch: int) -> list[Message | None]:
        """Return the messages that an action needs and makes; None without such a neighbour."""
        step = 1 if kind == "FORWARD" else -(kind in BACKWARDS)
        return [self._between(maker, maker + step, microbatch) for maker in (stage - step, stage)]

    def _between(self, maker: int, taker: int, microbatch: int) -> Message | None:
        rank_of = self._rank_of
        if maker == taker or maker not in rank_of or taker not in rank_of:
            return None
        return Message(taker < maker, taker, microbatch, rank_of[maker], rank_of[taker])

    def sends(self, message: Message, backend: VirtualBackend, nbytes: int) -> None:
        """Send a message, after all current work of compute and earlier messages that way."""
        if message.sender == message.receiver:
            self.arrives_s[message] = 0.0
            return
        way = message.sender, message.receiver
        if way not in self._streams:
            self._streams[way] = backend.new_stream()
        link, stream = self._link, self._streams[way]
        stream.wait_stream(backend.compute)
        self.arrives_s[message] = stream.launch(link.latency_s + nbytes / link.bytes_per_s)

    def receive(self, message: Message, backend: VirtualBackend) -> float:
        """Have compute wait for a message; return the time in which it waits for nothing else."""
        arrives_s = self.arrives_s.pop(message)
        if message.sender == message.receiver:
            return 0.0
        compute, others_s = backend.compute, backend.compute.ready_at_s
        compute.wait_until(arrives_s)
        compute.launch(0.0)  # otherwise the work after it would count as stalled
        return max(0.0, arrives_s - max(others_s, backend.host.now_s))


@dataclass(eq=False)
class VirtualRank:
    """Rank of a virtual pipeline. Its manager must be in use while it runs an action."""

    order: PipelineOrder
    number: int
    manager: PipelineOffloadManager
    backend: VirtualBackend
    work: RankWork
    messages: Messages

    def begin_step(self, begin_s: float) -> None:
        backend = self.backend
        backend.host.wait_until(begin_s)
        self.work.begin_step()
        self._begin_s = backend.host.now_s
        self._busy_s, self._stalled_s = backend.compute.busy_s, backend.compute.stalled_s
        self._offload_s = backend.offload_s
        self._before = self.manager.statistics()
        self._waited_s: defaultdict[int, float] = defaultdict(float)
        backend.memory.take_peak()

    def turns(self) -> Iterator[bool]:
        """Run the step's actions. Yields True after each, False while the next lacks a message."""
        messages, backend, work = self.messages, self.backend, self.work
        for kind, stage, microbatch in self.order.actions[self.number]:
            needed, made = messages.around(kind, stage, microbatch)
            if needed is not None:
                while needed not in messages.arrives_s:
                    yield False
                waited_s = messages.receive(needed, backend)
                if needed.sender != self.number:
                    self._waited_s[needed.sender] += waited_s
            nbytes = 0
            if kind == "FORWARD":
                nbytes = work.forward(stage, microbatch)
            elif kind == "REDUCE_GRAD":
                work.reduce(stage)
            else:
                nbytes = work.backward(kind, stage, microbatch)
            if made is not None:
                messages.sends(made, backend, nbytes)
            yield True
        work.update()

    def ended(self) -> RankStep:
        """Return the cost of the step, when all actions are over."""
        compute, statistics = self.backend.compute, self.manager.statistics()
        stalled_s = compute.stalled_s - self._stalled_s
        return RankStep(
            seconds=compute.free_at_s - self._begin_s,
            busy_s=compute.busy_s - self._busy_s,
            stalled_s=max(0.0, stalled_s - sum(self._waited_s.values())),
            waited_s=dict(self._waited_s),
            peak_bytes=self.backend.memory.peak_bytes,
            host_peak_bytes=statistics.host_bytes_peak,
            bytes_offloaded=statistics.bytes_offloaded - self._before.bytes_offloaded,
            on_demand_reloads=statistics.on_demand_reloads - self._before.on_demand_reloads,
            offload_s=self.backend.offload_s - self._offload_s,
            num_in_flight=self.order.num_in_flight()[self.number],
            bounds=self.manager.bounds.now,
        )


def run_step(
    ranks: Sequence[VirtualRank],
    in_use: Callable[[VirtualRank], AbstractContextManager[object]] = nullcontext,
) -> PipelineStep:
    """Run a step of all ranks, each inside of its context ``in_use``. See NOTE [ Turns ]."""
    begin_s = max(rank.backend.seconds for rank in ranks)
    for rank in ranks:
        with in_use(rank):
            rank.begin_step(begin_s)
    running = {rank: rank.turns() for rank in ranks}
    while running:
        has_run = False
        for rank, turns in [*running.items()]:
            with in_use(rank):
                for may_go_on in turns:
                    if not may_go_on:
                        break
                    has_run = True
                else:
                    del running[rank]
        assert has_run or not running, "a schedule has no circles"
    return PipelineStep([rank.ended() for rank in ranks])


def run_pipeline(
    order: PipelineOrder,
    work: Work,
    hardware: Hardware,
    *,
    config: OffloadConfig | None = None,
    peers: PeerLink | None = None,
    num_steps: int = 2,
    trace: Any = None,
) -> PipelineStep:
    """Run some steps, and return the cost of the last one.

    All ranks begin a step at the same time, when all have ended the step before.

    Args:
        order: The actions of each rank.
        work: Runs the actions.
        hardware: Figures of each rank's device.
        config: Options of each rank's engine; None for no offload. Each rank may use
            ``host_budget_bytes`` of host memory, or unlimited host memory if that is None.
        peers: The link between ranks; the default is a network.
        num_steps: Number of steps. The engine derives its plan from the first one.
        trace: A :class:`pp_offload.trace.Trace`, which records all ranks into one file.

    Raises:
        TypeError: An argument is of another kind.
        ValueError: The order and the work do not have the same number of stages, or there is no
            step.
    """
    check_count("num_steps", num_steps, least=1)
    check_kind("order", order, PipelineOrder, "a PipelineOrder")
    if config is not None:
        check_config(config)
    with ExitStack() as stack:
        if config is not None and config.offload_plan is not None:
            names: dict[int, tuple[str, ...]] = {}
            for number, rank in enumerate(config.offload_plan.ranks):
                names.update(zip(order.stages_of(number), rank.recomputed, strict=False))
            stack.enter_context(work.recomputing(names))
        work.prepare(order, VirtualBackend(hardware))
        messages = Messages(order, peers or PeerLink())
        ranks = []
        for number in range(order.num_ranks):
            backend = VirtualBackend(hardware)
            running = running_rank(order, work, number, backend, config or OffloadConfig())
            manager, rank_work = stack.enter_context(running)
            if config is None:
                manager.disable_offload()
            ranks.append(VirtualRank(order, number, manager, backend, rank_work, messages))
        if trace is not None:
            stack.enter_context(trace.ranks([rank.manager for rank in ranks]))
        for _ in range(num_steps):
            gc.collect()
            with collector_off():  # otherwise a peak would depend on its timing
                step = run_step(ranks, lambda rank: use_manager(rank.manager))
        return step


@contextmanager
def running_rank(
    order: PipelineOrder, work: Work, number: int, backend: VirtualBackend, config: OffloadConfig
) -> Iterator[tuple[PipelineOffloadManager, RankWork]]:
    """Make the manager and the work of a rank, with host memory of its own."""
    if config.host_budget_bytes is None:  # the memory of this machine does not matter
        config = replace(config, host_budget_bytes=UNLIMITED)
    with as_another_process():
        manager = PipelineOffloadManager(config=config, backend=backend)
    with ExitStack() as stack:
        stack.callback(manager.retire)
        with use_manager(manager):
            rank_work = work.on(order, number, backend)
        stack.callback(rank_work.close)
        yield manager, rank_work
