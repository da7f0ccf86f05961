"""Prediction of a step of all ranks of a schedule, in numbers: each rank plays its tapes.

    step = predict(order, tapes, DEVICES["H100"], config=OffloadConfig())

    predictor = Predictor(order, tapes, DEVICES["H100"], OffloadConfig(), None)
    leaving = tuple(RankChoice(0) for _ in tapes)
    predictor.short(leaving).peak_bytes  # each choice is predicted once

NOTE [ Short steps ]
    A schedule of many microbatches has as many in flight as one with twice as many microbatches as
    ranks, so the peaks are equal. Ways are tried on such a short step. The ways with nearly the
    shortest step are then tried with all microbatches. But a peak may still differ by a few bytes,
    and a way that does not fit then loses a group. One of few groups makes a large difference, so
    with few groups no step is shortened.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import repeat
from typing import Any, NamedTuple

from pp_offload._common.checks import check_count, check_kind
from pp_offload._common.offload_plan import OffloadPlan, RankPlan
from pp_offload._common.processes import collector_off
from pp_offload._core.group import ChunkKey, Place
from pp_offload._groups.plan import options_of
from pp_offload._groups.split_backward import BackwardPass
from pp_offload._memory.budget import UNLIMITED, as_another_process
from pp_offload.config import OffloadConfig, check_config, without_plan
from pp_offload.pipelining import backward_order
from pp_offload.plan.numbers import Bytes, NumberChunk, NumberDevice, NumberManager
from pp_offload.plan.tape import Event, Mark, RankTapes
from pp_offload.simulate.hardware import Hardware
from pp_offload.simulate.pipeline import Messages, PeerLink, PipelineStep, VirtualRank, run_step
from pp_offload.simulate.schedules import PipelineOrder
from pp_offload.simulate.stages import RankWork


def predict(
    order: PipelineOrder,
    tapes: Sequence[RankTapes],
    hardware: Hardware,
    *,
    config: OffloadConfig | None = None,
    peers: PeerLink | None = None,
    num_steps: int = 2,
) -> PipelineStep:
    """Predict the result of :func:`pp_offload.simulate.run_pipeline`, to the byte and far sooner.

    Args:
        order: Actions of each rank.
        tapes: Work of each rank; see :func:`record`.
        hardware: Device of each rank. Times of operators are in the tapes.
        config: Options of each rank's engine; None for no offload. Only ``max_in_flight_bytes``,
            ``prefetch_bytes``, ``host_budget_bytes``, ``activation_offload_fraction``,
            ``delta_offload_bytes_across_pp_ranks`` and ``split_backward`` are used; the tapes name
            the tensors that may leave. A limit of ``"auto"`` counts as none. Each rank may take
            ``host_budget_bytes`` of host memory, without a limit if that is None.
        peers: How messages pass from rank to rank; the default is a network.
        num_steps: Number of steps; the engine derives its plan and bounds from the first ones.

    Raises:
        TypeError: An argument is of another kind.
        ValueError: A rank or stage has no tape, or the config has an integer
            ``device_limit_bytes`` or a disk.
    """
    if config is None:
        ranks = tuple(RankPlan(rank.planned(rank.places)) for rank in tapes)
        config = OffloadConfig(plan=OffloadPlan("", 0, 0.0, 0.0, ranks))
    return predict_each(order, tapes, hardware, config, peers, num_steps)[-1]


def predict_each(
    order: PipelineOrder,
    tapes: Sequence[RankTapes],
    hardware: Hardware,
    config: OffloadConfig,
    peers: PeerLink | None,
    num_steps: int,
) -> list[PipelineStep]:
    """Predict each of the steps; see :func:`predict`."""
    check_count("num_steps", num_steps, least=1)
    check_kind("order", order, PipelineOrder, "a PipelineOrder")
    check_config(config)
    if isinstance(config.limit, int):
        raise ValueError(
            "device_limit_bytes is given, which an engine meets by measuring its device; expected "
            "a plan of choose(), or no limit; measure the cost of a limit with run_pipeline"
        )
    stages = [sorted(rank.stages) for rank in tapes]
    expected = [order.stages_of(rank) for rank in range(order.num_ranks)]
    if stages != expected:
        raise ValueError(
            f"the tapes are of stages {stages}, rank by rank, expected {expected}; record() them "
            "with the same order"
        )
    host_bytes = UNLIMITED if config.host_budget_bytes is None else config.host_budget_bytes
    config = replace(config, device_limit_bytes=None, host_budget_bytes=host_bytes)
    messages = Messages(order, peers or PeerLink())
    with collector_off():  # the collector would search all ranks' objects again and again
        ranks = []
        for number, rank_tapes in enumerate(tapes):
            work = TapeWork(order, number, rank_tapes, NumberDevice(hardware), config)
            manager: Any = work.manager
            ranks.append(VirtualRank(order, number, manager, work.device, work, messages))
        steps = [run_step(ranks) for _ in range(num_steps)]
        del ranks  # or the collector would search them now
    return steps


@dataclass(eq=False)
class TapeWork(RankWork):
    """Work of a rank's actions, played from its tapes on a device, by a manager of its own."""

    order: PipelineOrder
    number: int
    tapes: RankTapes
    device: NumberDevice
    config: OffloadConfig

    def __post_init__(self) -> None:
        with as_another_process():
            self.manager = NumberManager(self.config, self.device)
        actions, self._stages = self.order.actions[self.number], self.order.stages_of(self.number)
        self._backwards = backward_order(actions, self._stages, [0], self.config)
        self._chunks: dict[ChunkKey, Any] = {}  # a program may hold what they saved until its end
        self._have_gradients: set[int] = set()  # stages that have had a backward in the step
        self._has_updated = False

    def begin_step(self) -> None:
        """Begin a step with the plan learned from the last step."""
        self._chunks.clear()
        self._have_gradients.clear()
        self._backwards.begin_step(self.manager, self.number)
        state_bytes = self.tapes.state_bytes * self._has_updated
        self.device.memory = Bytes(self.tapes.resident_bytes + state_bytes)

    def forward(self, stage: int, microbatch: int) -> int:
        manager, tape = self.manager, self.tapes.stages[stage]
        smallest, make = self.config.min_offloaded_tensor_size, partial(NumberChunk, tape)
        num, vp_stage = len(self._stages), self._stages.index(stage)
        manager.begin_chunk(num, vp_stage, smallest, microbatch=microbatch, make=make)
        chunk: Any = manager.forward.chunk
        self._chunks[ChunkKey(vp_stage, microbatch)] = chunk
        self._play(tape.forward, chunk)
        manager.end_chunk()
        return tape.sent_bytes

    def backward(self, kind: str, stage: int, microbatch: int) -> int:
        tape, key = self.tapes.stages[stage], ChunkKey(self._stages.index(stage), microbatch)
        backward = tape.backward[kind]
        events = backward.later if stage in self._have_gradients else backward.first
        if kind != "BACKWARD_INPUT":
            self._have_gradients.add(stage)
        part = BackwardPass.WEIGHT if kind == "BACKWARD_WEIGHT" else BackwardPass.INPUT
        with self._backwards.running(self.manager, key, part):
            self._play(events, self._chunks[key])
        return tape.sent_back_bytes

    def reduce(self, stage: int) -> None:
        self._play(self.tapes.stages[stage].reduce)

    def update(self) -> None:
        update = self.tapes.update
        self._play(update.later if self._has_updated else update.first)
        self._has_updated = True

    def _play(self, events: Sequence[Event], chunk: NumberChunk | None = None) -> None:
        """Play events; those after the last backward are stretches, and have no chunk."""
        for event in events:
            if isinstance(event, Mark):
                getattr(chunk, event.kind)(event.number, event.use)
            else:
                self.device.play(event)


# Choices

# Number of steps that are predicted before a plan is returned: the first step, in which an
# optimizer has no state yet, and later ones, which earlier steps could influence.
NUM_PROVEN = 4
# Most groups of all ranks for which all microbatches are always predicted, each order is tried
# within all bounds, and single groups are exchanged.
FEW = 12

Bounds = tuple[int, int]  # on bytes in flight, and on bytes ahead
Nums = tuple[int, ...]  # number of layers that each rank recomputes


class RankChoice(NamedTuple):
    """Choice of a rank: layers recomputed, bounds, and groups that stay, by default none."""

    num_recomputed: int
    bounds: Bounds | None = None  # None if the engine is to choose them
    stay: tuple[Place, ...] = ()  # places of groups, in the order in which they were chosen


Choice = tuple[RankChoice, ...]  # of all ranks


def nums_of(choice: Choice) -> Nums:
    """Number of layers that each rank recomputes."""
    return tuple(rank.num_recomputed for rank in choice)


def peak_of(step: PipelineStep | OffloadPlan) -> int:
    """Peak of the fullest rank, in bytes."""
    return max(rank.peak_bytes for rank in step.ranks)


@dataclass(frozen=True)
class Tried:
    """A choice, and the predicted step."""

    choice: Choice
    step: PipelineStep

    @property
    def peak_bytes(self) -> int:
        """Peak of the fullest rank."""
        return peak_of(self.step)

    @property
    def cost(self) -> tuple[float, int]:
        """Rounded time of the step; among equal times, the bytes that leave decide."""
        digits = float(f"{self.step.seconds:.6e}")
        return digits, sum(rank.bytes_offloaded for rank in self.step.ranks)


@dataclass
class Predictor:
    """Predictor of one pipeline; for its fields see :class:`Chooser`."""

    order: PipelineOrder
    tapes: Sequence[RankTapes]
    hardware: Hardware
    config: OffloadConfig
    peers: PeerLink | None

    def __post_init__(self) -> None:
        self.no_layers: Nums = (0,) * len(self.tapes)
        self.all_layers: Nums = tuple(rank.num_layers for rank in self.tapes)
        self.has_few = sum(len(rank.places) for rank in self.tapes) <= FEW
        self._short = self.order if self.has_few else self.order.shortened()
        self._played: dict[Any, list[PipelineStep]] = {}

    def short(self, choice: Choice) -> Tried:
        """Predict a short step by a choice; see NOTE [ Short steps ]."""
        return Tried(choice, *self._steps(self._short, choice, 1))

    def whole(self, choice: Choice) -> Tried:
        """Predict a step with all microbatches."""
        return Tried(choice, *self._steps(self.order, choice, 1))

    def proven(self, choice: Choice) -> Tried:
        """Predict steps by a choice from the first on; return the last with the highest peaks."""
        steps = self._steps(self.order, choice, NUM_PROVEN)
        peaks = zip(*([rank.peak_bytes for rank in step.ranks] for step in steps), strict=True)
        last = zip(steps[-1].ranks, map(max, peaks), strict=True)
        return Tried(choice, PipelineStep([replace(rank, peak_bytes=peak) for rank, peak in last]))

    def without_offload(self, nums: Nums, *, is_short: bool = False) -> PipelineStep:
        """Predict the step in which all groups stay."""
        order = self._short if is_short else self.order
        stays = [tapes.places for tapes in self.tapes_of(nums)]
        return self._steps(order, tuple(map(RankChoice, nums, repeat(None), stays)), 1)[0]

    def own_bounds(self, choice: Choice) -> list[Bounds]:
        """Return the bounds that an engine would choose for the groups that leave."""
        free = tuple(rank._replace(bounds=None) for rank in choice)
        return [rank.bounds for rank in self._steps(self._short, free, 2)[-1].ranks]

    @cached_property
    def first_bounds(self) -> list[Bounds]:
        """Bounds that an engine chooses if all groups leave."""
        return self.own_bounds(tuple(map(RankChoice, self.no_layers)))

    def tapes_of(self, nums: Nums) -> list[RankTapes]:
        """Return the tapes with these numbers of layers recomputed."""
        return [tapes.recomputing(num) for tapes, num in zip(self.tapes, nums, strict=True)]

    def plans_of(self, choice: Choice) -> Iterator[RankPlan]:
        """Make the plans of the ranks, without figures of a step."""
        for rank, tapes in zip(choice, self.tapes_of(nums_of(choice)), strict=True):
            in_flight, ahead = rank.bounds or (None, None)
            yield RankPlan(
                tapes.planned(frozenset(rank.stay)),
                tapes.recomputed,
                optimizer_bytes=tapes.state_bytes,
                max_in_flight_bytes=in_flight,
                prefetch_bytes=ahead,
            )

    def _steps(self, order: PipelineOrder, choice: Choice, num: int) -> list[PipelineStep]:
        """Predict steps by a choice from the first one on; a single one with optimizers' state."""
        ranks = tuple((rank.num_recomputed, rank.bounds, frozenset(rank.stay)) for rank in choice)
        key = order.num_microbatches, ranks, num
        if key not in self._played:
            num_microbatches, plans = order.num_microbatches, tuple(self.plans_of(choice))
            options = options_of(self.config, num_microbatches=num_microbatches, schedule="")
            plan = OffloadPlan("", 0, 0.0, 0.0, plans, options=options)
            config = replace(without_plan(self.config), plan=plan)
            tapes = self.tapes_of(nums_of(choice))
            hardware = self.hardware
            if num == 1:  # stands for later steps, whose host memory is pinned already
                tapes = [rank.with_state() for rank in tapes]
                hardware = replace(hardware, pin_bytes_per_s=None)
            self._played[key] = predict_each(order, tapes, hardware, config, self.peers, num)
        return self._played[key]
