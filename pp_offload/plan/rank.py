"""The work of one rank from its tapes, on an engine in numbers.

rank = number_rank(order, 0, tapes[0], hardware, config, messages)  # a VirtualRank
rank.begin_step(0.0)
while rank.may_go_on:
    rank.run_next()
rank.ended().peak_bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pp_offload._core.keys import ChunkKey
from pp_offload._groups.split_backward import BackwardPass, SplitBackward
from pp_offload._memory.budget import UNLIMITED, as_another_process
from pp_offload.config import OffloadConfig
from pp_offload.pipelining import backward_order
from pp_offload.plan.device import Bytes, NumberDevice
from pp_offload.plan.engine import NumberChunk, NumberManager
from pp_offload.plan.tape import Backward, Event, RankTapes, Stretch
from pp_offload.simulate.hardware import Hardware
from pp_offload.simulate.messages import Messages
from pp_offload.simulate.rank import VirtualRank
from pp_offload.simulate.schedules import PipelineOrder
from pp_offload.simulate.stages import RankWork


def number_rank(
    order: PipelineOrder,
    number: int,
    tapes: RankTapes,
    hardware: Hardware,
    config: OffloadConfig | None,
    messages: Messages,
    *,
    has_state: bool = False,
) -> VirtualRank:
    """Make a rank that plays its tapes. Without a config no group leaves; with ``has_state`` the
    optimizer starts with its state.
    """
    if config is None:
        stages = {stage: tape.staying() for stage, tape in tapes.stages.items()}
        config, tapes = OffloadConfig(), replace(tapes, stages=stages)
    host_bytes = UNLIMITED if config.host_budget_bytes is None else config.host_budget_bytes
    config = replace(config, device_limit_bytes=None, host_budget_bytes=host_bytes)
    device = NumberDevice(hardware)
    with as_another_process():
        manager: Any = NumberManager(config, device)
    work = TapeWork(order, number, tapes, manager, has_state=has_state)
    return VirtualRank(order, number, manager, device, work, messages)


class TapeWork(RankWork):
    """Work of a rank's actions, played from its tapes."""

    def __init__(
        self,
        order: PipelineOrder,
        number: int,
        tapes: RankTapes,
        manager: NumberManager,
        *,
        has_state: bool,
    ) -> None:
        self._has_state = has_state
        self._tapes, self._number = tapes, number
        self._manager = manager
        self._device: Any = manager.backend
        self._stages = order.stages_of(number)
        self._order = backward_order(order.actions[number], self._stages, late_stages=[0])
        is_keeping = manager.config.split_backward == "keep"
        split = self._order.split
        self._split = SplitBackward(split, is_keeping=is_keeping) if split else None
        self._chunks: dict[ChunkKey, Any] = {}
        """Chunks of the step. A program may hold what they saved until its end."""

        self._have_gradients: set[int] = set()
        """Stages that have had a backward in the step."""

    def begin_step(self) -> None:
        """Begin a step as an attached schedule does, with the plan learned from the last step."""
        self._chunks.clear()
        self._have_gradients.clear()
        manager = self._manager
        manager.reset()
        manager.offloader.follow_parts(self._split)
        manager.step.pipeline_rank = self._number
        manager.step.queue.know_order(self._order.keys, is_told=True)
        state_bytes = self._tapes.update.state_bytes * self._has_state
        self._device.memory = Bytes(self._tapes.resident_bytes + state_bytes)

    def forward(self, stage: int, microbatch: int) -> int:
        manager, tape, key = self._manager, self._tapes.stages[stage], self._key(stage, microbatch)
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
        tape, is_input = self._tapes.stages[stage], kind == "BACKWARD_INPUT"
        events = tape.input_part if is_input else self._last(stage, tape.backward)
        self._play_backward(BackwardPass.INPUT, self._key(stage, microbatch), events)
        return tape.sent_back_bytes

    def weight(self, stage: int, microbatch: int) -> None:
        events = self._last(stage, self._tapes.stages[stage].weight_part)
        self._play_backward(BackwardPass.WEIGHT, self._key(stage, microbatch), events)

    def _key(self, stage: int, microbatch: int) -> ChunkKey:
        return ChunkKey(self._stages.index(stage), microbatch)

    def _last(self, stage: int, part: Backward) -> Sequence[Event]:
        """Return the events of the part of a backward that makes gradients of parameters."""
        is_first = stage not in self._have_gradients
        self._have_gradients.add(stage)
        return part.first if is_first else part.later

    def _play_backward(self, part: BackwardPass, key: ChunkKey, events: Sequence[Event]) -> None:
        """Play a backward or a part of it, as an attached schedule runs it."""
        manager, chunk = self._manager, self._chunks[key]
        if key in self._order.split:
            with manager.backward_pass(key, part):
                self._play(events, chunk)
            return
        if part is BackwardPass.WEIGHT or key not in self._order.late:
            manager.begin_backward(key)
        self._play(events, chunk)

    def reduce(self, stage: int) -> None:
        self._play(self._tapes.stages[stage].reduce, None)

    def update(self) -> None:
        update = self._tapes.update
        self._play(update.later if self._has_state else update.first, None)
        self._has_state = True

    def _play(self, events: Sequence[Event], chunk: NumberChunk | None) -> None:
        run, pass_by = self._device.run, self._device.memory.pass_by
        for event in events:
            if isinstance(event, Stretch):
                if event.seconds:
                    run(event.seconds)
                pass_by(event.nbytes, event.rise)
                continue
            assert chunk is not None, "events after the last backward have no payloads"
            getattr(chunk, event.kind)(event.number, event.use)
