"""Prediction of a step of all ranks of a schedule, in numbers: each rank plays its tapes.

step = predict(order, tapes, DEVICES["H100"], config=OffloadConfig())
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pp_offload._common.checks import check_count, check_kind
from pp_offload._common.processes import collector_off
from pp_offload._core.group import ChunkKey
from pp_offload._groups.split_backward import BackwardPass
from pp_offload._memory.budget import UNLIMITED, as_another_process
from pp_offload.config import OffloadConfig, check_config
from pp_offload.pipelining import backward_order
from pp_offload.plan.numbers import Bytes, NumberChunk, NumberDevice, NumberManager
from pp_offload.plan.tape import Event, RankTapes, Stretch
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
    return predict_each(order, tapes, hardware, config, peers, num_steps)[-1]


def predict_each(
    order: PipelineOrder,
    tapes: Sequence[RankTapes],
    hardware: Hardware,
    config: OffloadConfig | None,
    peers: PeerLink | None,
    num_steps: int,
) -> list[PipelineStep]:
    """Predict each of the steps; see :func:`predict`."""
    check_count("num_steps", num_steps, least=1)
    check_kind("order", order, PipelineOrder, "a PipelineOrder")
    if config is None:  # no group leaves
        config, tapes = OffloadConfig(), [rank.staying() for rank in tapes]
    check_config(config)
    _check_options(config)
    _check_tapes(order, tapes)
    host_bytes = UNLIMITED if config.host_budget_bytes is None else config.host_budget_bytes
    config = replace(config, device_limit_bytes=None, host_budget_bytes=host_bytes)
    messages = Messages(order, peers or PeerLink())
    with collector_off():  # the collector would search all ranks' objects again and again
        ranks = []
        for number, rank_tapes in enumerate(tapes):
            work = TapeWork(order, number, rank_tapes, NumberDevice(hardware), config)
            manager: Any = work.manager
            ranks.append(VirtualRank(order, number, manager, work.device, work, messages))
        steps = []
        for _ in range(num_steps):
            run_step(ranks)
            steps.append(PipelineStep([rank.ended() for rank in ranks]))
        del ranks  # or the collector would search them now
    return steps


def _check_options(config: OffloadConfig) -> None:
    if isinstance(config.limit, int):
        raise ValueError(
            "device_limit_bytes is given, which an engine meets by measuring its device; expected "
            "a plan of choose(), or no limit; measure the cost of a limit with run_pipeline"
        )


def _check_tapes(order: PipelineOrder, tapes: Sequence[RankTapes]) -> None:
    stages = [sorted(rank.stages) for rank in tapes]
    expected = [order.stages_of(rank) for rank in range(order.num_ranks)]
    if stages != expected:
        raise ValueError(
            f"the tapes are of stages {stages}, rank by rank, expected {expected}; record() them "
            "with the same order"
        )


def check_smallest(tapes: Sequence[RankTapes], config: OffloadConfig) -> None:
    """Check that tapes were recorded with the smallest tensor of the config."""
    expected = config.min_offloaded_tensor_size
    for recorded in {rank.min_offloaded_tensor_size for rank in tapes} - {expected}:
        raise ValueError(
            f"the tapes were recorded with min_offloaded_tensor_size {recorded}, and the config "
            f"beside them has {expected}, expected the same; give record() and choose() one config"
        )


class TapeWork(RankWork):
    """Work of a rank's actions, played from its tapes on a device, by a manager of its own."""

    def __init__(
        self,
        order: PipelineOrder,
        number: int,
        tapes: RankTapes,
        device: NumberDevice,
        config: OffloadConfig,
    ) -> None:
        self.device = device
        with as_another_process():
            self.manager = NumberManager(config, device)
        self._tapes, self._number = tapes, number
        self._stages = order.stages_of(number)
        self._order = backward_order(order.actions[number], self._stages, late_stages=[0])
        self._split = self._order.split_backward(config)
        self._chunks: dict[ChunkKey, Any] = {}
        """Chunks of the step. A program may hold what they saved until its end."""

        self._have_gradients: set[int] = set()
        """Stages that have had a backward in the step."""

        self._has_updated = False

    def begin_step(self) -> None:
        """Begin a step with the plan learned from the last step."""
        self._chunks.clear()
        self._have_gradients.clear()
        self._order.begin_step(self.manager, self._number, self._split)
        state_bytes = self._tapes.state_bytes * self._has_updated
        self.device.memory = Bytes(self._tapes.resident_bytes + state_bytes)

    def forward(self, stage: int, microbatch: int) -> int:
        manager, tape, key = self.manager, self._tapes.stages[stage], self._key(stage, microbatch)
        manager.begin_chunk(
            len(self._stages),
            key.vp_stage,
            manager.config.min_offloaded_tensor_size,
            microbatch=microbatch,
            make=partial(NumberChunk, tape),
        )
        chunk: Any = manager.forward.chunk
        self._chunks[key] = chunk
        self._play(tape.forward, chunk)
        manager.end_chunk()
        return tape.sent_bytes

    def backward(self, kind: str, stage: int, microbatch: int) -> int:
        tape, key = self._tapes.stages[stage], self._key(stage, microbatch)
        backward = tape.backward[kind]
        events = backward.later if stage in self._have_gradients else backward.first
        if kind != "BACKWARD_INPUT":
            self._have_gradients.add(stage)
        part = BackwardPass.WEIGHT if kind == "BACKWARD_WEIGHT" else BackwardPass.INPUT
        with self._order.running(self.manager, key, part):
            self._play(events, self._chunks[key])
        return tape.sent_back_bytes

    def _key(self, stage: int, microbatch: int) -> ChunkKey:
        return ChunkKey(self._stages.index(stage), microbatch)

    def reduce(self, stage: int) -> None:
        self._play(self._tapes.stages[stage].reduce, None)

    def update(self) -> None:
        update = self._tapes.update
        self._play(update.later if self._has_updated else update.first, None)
        self._has_updated = True

    def _play(self, events: Sequence[Event], chunk: NumberChunk | None) -> None:
        run, pass_by = self.device.run, self.device.memory.pass_by
        for event in events:
            if isinstance(event, Stretch):
                if event.seconds:
                    run(event.seconds)
                pass_by(event.nbytes, event.rise)
                continue
            assert chunk is not None, "events after the last backward have no payloads"
            getattr(chunk, event.kind)(event.number, event.use)
