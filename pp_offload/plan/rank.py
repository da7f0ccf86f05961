"""One rank in numbers: it plays the tape of each action.

rank = NumberRank(order, 0, tapes[0], hardware, config)
rank.begin_step(messages, 0.0, is_last=True)
while rank.has_more:
    rank.run_what_can()
rank.ended().peak_bytes
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from pp_offload._core.keys import ChunkKey, WeightPassKey
from pp_offload._core.mover import Counts
from pp_offload._groups.chunk_queue import Key
from pp_offload._groups.plan import make_plan
from pp_offload._groups.split_backward import BackwardPass, SplitBackward, Uses
from pp_offload._groups.step import StepRecord
from pp_offload.config import OffloadConfig
from pp_offload.pipelining import Action
from pp_offload.plan.bounds import Bounds
from pp_offload.plan.device import NumberDevice
from pp_offload.plan.engine import NumberChunk, NumberEngine, NumberOffloader
from pp_offload.plan.places import NumberPlaces
from pp_offload.plan.staying import staying
from pp_offload.plan.tape import (
    Close,
    Drop,
    Event,
    Gone,
    Lost,
    Open,
    RankTapes,
    Release,
    Stretch,
    Tape,
    Use,
)
from pp_offload.simulate.hardware import Hardware
from pp_offload.simulate.messages import Message, Messages, PeerLink
from pp_offload.simulate.orders import BACKWARDS, PipelineOrder
from pp_offload.simulate.rank import RankStep


class Turn(NamedTuple):
    """An action, and what it needs to know."""

    action: Action
    key: ChunkKey
    tape: Tape

    needed: Message | None
    """From a neighbour."""

    made: Message | None
    """For a neighbour."""


_PARTS = {"BACKWARD_INPUT": BackwardPass.INPUT, "BACKWARD_WEIGHT": BackwardPass.WEIGHT}


def _goes_backward(turn: Turn) -> Key | None:
    """What an action takes out of the queue, as ``backward_order`` says it."""
    kind, is_first = turn.action.kind, turn.action.stage_index == 0
    if kind == "BACKWARD_WEIGHT" and not is_first:
        return WeightPassKey(turn.key)
    # The first part does nothing in the first stage, which has no inputs to differentiate.
    is_begin = kind in BACKWARDS and not (kind == "BACKWARD_INPUT" and is_first)
    return turn.key if is_begin or kind == "BACKWARD_WEIGHT" else None


class NumberRank:
    """A rank at its work, step by step.

    Args:
        order: Has its actions.
        number: Which rank.
        tapes: What it does.
        hardware: Its device's.
        config: Options of its engine; None for no offload.

    Attributes:
        has_state: Whether its optimizer has made its state.
        moved: What its engine moved, in all steps.
        turns: Its actions, which are those of each step.
        number: See above.
    """

    def __init__(
        self,
        order: PipelineOrder,
        number: int,
        tapes: RankTapes,
        hardware: Hardware,
        config: OffloadConfig | None,
    ) -> None:
        self.moved = Counts()
        self.number = number
        self._tapes = tapes.stages
        if config is None:
            self._tapes = {stage: staying(tape) for stage, tape in tapes.stages.items()}
        self._resident_bytes = tapes.resident_bytes
        self._update = tapes.update
        self.has_state = False
        self._hardware = hardware
        self._config = config
        self._vp_stage = {stage: index for index, stage in enumerate(order.stages_of(number))}
        self._bounds = Bounds(config or OffloadConfig())
        self._places = NumberPlaces(config or OffloadConfig(), hardware)
        # Without such an option each of many equal ranks makes the same plan.
        options = config or OffloadConfig()
        differ = options.offload_plan or options.delta_offload_bytes_across_pp_ranks
        self._rank_of_plan = number if differ else 0
        self._plan = make_plan((), options, self._rank_of_plan)
        self._bounds.follow(self._plan)
        self._step: _Step | None = None
        self.turns = self._turns_of(order)
        self._order = [key for turn in self.turns if (key := _goes_backward(turn)) is not None]
        self._split = frozenset(one.chunk for one in self._order if isinstance(one, WeightPassKey))
        self._used: Uses = {part: {} for part in BackwardPass}
        self._used_order: dict[int, list[int]] = {}
        self._next = len(self.turns)

    def _turns_of(self, order: PipelineOrder) -> list[Turn]:
        messages, turns = Messages(order, PeerLink()), []
        for action in order.actions[self.number]:
            key = ChunkKey(self._vp_stage[action.stage_index], action.microbatch)
            tape = self._tapes[action.stage_index]
            needed, made = messages.needed_by(*action), messages.made_by(*action)
            turns.append(Turn(action, key, tape, needed, made))
        return turns

    @property
    def seconds(self) -> float:
        """When all of the step has run; 0 before the first one."""
        return 0.0 if self._step is None else self._step.device.seconds

    def wait_until(self, time_s: float) -> None:
        """Have the host wait, as it does at the end of a step until all ranks have ended it."""
        if self._step is not None:
            self._step.device.host.wait_until(time_s)

    def begin_step(self, messages: Messages, begin_s: float, *, is_last: bool) -> None:
        """From the first action again, with the plan and the bounds that the last step taught.

        Args:
            messages: To and from the others.
            begin_s: When all ranks had ended the last one. Then clocks begin anew.
            is_last: Whether no step is to learn from this one.
        """
        self.wait_until(begin_s)
        if self._step is not None:
            self._step.engine.mover.poll()  # what was read for nobody gives its memory back
            self._learn(self._step)
        self._places.settle()
        device = NumberDevice(self._hardware)
        device.memory.add(self._resident_bytes)
        device.memory.add(self._update.state_bytes * self.has_state)
        self._step = self._new_step(device, begin_s, messages)
        if not is_last:
            self._bounds.watch(self._step.engine, device)
        self._next = 0

    def _new_step(self, device: NumberDevice, begin_s: float, messages: Messages) -> _Step:
        config = self._config or OffloadConfig()
        record = StepRecord()
        record.queue.know_order(self._order, is_told=True)
        engine = NumberEngine(device, self._places.tier(device, begin_s), record, config)
        engine.mover.counts = self.moved
        self._bounds.hold(engine)
        is_keeping = config.split_backward == "keep"
        split = SplitBackward(self._split, is_keeping=is_keeping)
        split.uses, split.order = self._used, self._used_order
        engine.observers.add(split)
        return _Step(device, NumberOffloader(engine, record, self._plan, split), messages)

    def _learn(self, step: _Step) -> None:
        config = self._config
        if config is None:
            return
        if step.record.is_complete():
            step.record.pipeline_rank = self._rank_of_plan
            self._plan = step.record.make_plan(config)
            self._bounds.follow(self._plan)
        left = self._hardware.memory_bytes - step.device.memory.peak
        self._bounds.choose(
            kept=self._plan.kept,
            unused_bytes=max(0, left),
            sent_bytes=self.moved.bytes_offloaded - step.before.bytes_offloaded,
        )

    # Actions

    @property
    def has_more(self) -> bool:
        """Whether the step has further actions."""
        return self._next < len(self.turns)

    def run_what_can(self) -> int:
        """As many actions as have what they need; how many."""
        step, begin = self._running, self._next
        for turn in islice(self.turns, begin, None):
            if turn.needed is not None and not step.messages.is_there(turn.needed):
                break
            self._next += 1
            self._run(step, turn)
        if begin < self._next == len(self.turns):
            self._play(step, self._update.later if self.has_state else self._update.first, None)
            self.has_state = True
        return self._next - begin

    @property
    def _running(self) -> _Step:
        assert self._step is not None, "begin_step() comes first"
        return self._step

    def _run(self, step: _Step, turn: Turn) -> None:
        messages, device, kind = step.messages, step.device, turn.action.kind
        if turn.needed is not None:
            waited_s = messages.receive(turn.needed, device)
            if turn.needed.sender != self.number:
                step.waited_s[turn.needed.sender] += waited_s
        nbytes = 0
        if kind == "FORWARD":
            nbytes = self._forward(step, turn)
        elif kind == "REDUCE_GRAD":
            self._play(step, turn.tape.reduce, None)
        else:
            nbytes = self._backward(step, turn)
        if turn.made is not None:
            messages.sends(turn.made, device, nbytes)

    def _forward(self, step: _Step, turn: Turn) -> int:
        key, tape = turn.key, turn.tape
        chunk = step.chunks[key] = NumberChunk(tape, key, step.device, step.offloader)
        self._play(step, tape.forward, chunk)
        step.record.skip(chunk)
        step.num_in_flight += 1
        step.most_in_flight = max(step.most_in_flight, step.num_in_flight)
        return tape.sent_bytes

    def _backward(self, step: _Step, turn: Turn) -> int:
        """All of a backward, or a part of it."""
        tape, key, kind = turn.tape, turn.key, turn.action.kind
        chunk = step.chunks[key]
        is_split = key in self._split and bool(tape.groups)
        if is_split:
            step.begin_part(chunk, _PARTS[kind])
        elif _goes_backward(turn) is not None and tape.groups:
            step.record.begin_backward(chunk)
        if kind == "BACKWARD_INPUT":
            self._play(step, tape.input_part, chunk)
        else:
            last = tape.backward if kind == "FULL_BACKWARD" else tape.weight_part
            stage = turn.action.stage_index
            self._play(step, last.later if stage in step.have_gradients else last.first, chunk)
            step.have_gradients.add(stage)
            step.num_in_flight -= 1
        if is_split:
            step.end_part()
        return tape.sent_back_bytes

    def _play(self, step: _Step, events: Sequence[Event], chunk: NumberChunk | None) -> None:
        run, pass_by = step.device.run, step.device.memory.pass_by
        for event in events:
            if type(event) is Stretch:  # nearly half of all
                if event.seconds:
                    run(event.seconds)
                pass_by(event.nbytes, event.rise)
                continue
            assert chunk is not None, "nothing is saved behind the last backward"
            _TELL[type(event)](chunk, *event)

    # The end

    def ended(self) -> RankStep:
        """What the step cost."""
        step = self._running
        compute = step.device.compute
        return RankStep(
            seconds=compute.free_at_s,
            busy_s=compute.busy_s,
            stalled_s=max(0.0, compute.stalled_s - sum(step.waited_s.values())),
            waited_s=dict(step.waited_s),
            peak_bytes=step.device.memory.peak,
            host_peak_bytes=self._places.peak_bytes,
            bytes_offloaded=self.moved.bytes_offloaded - step.before.bytes_offloaded,
            on_demand_reloads=self.moved.on_demand_reloads - step.before.on_demand_reloads,
            offload_s=step.device.d2h.busy_s,
            num_in_flight=step.most_in_flight,
            bounds=(self._bounds.cap.nbytes, self._bounds.window.nbytes),
        )


_TELL: dict[type, Callable[..., None]] = {
    Open: NumberChunk.open,
    Close: NumberChunk.close_group,
    Use: NumberChunk.use,
    Lost: NumberChunk.lose,
    Drop: NumberChunk.drop,
    Release: NumberChunk.release,
    Gone: NumberChunk.gone,
}
"""What a chunk does at each kind of event."""


class _Step:
    """What is of one step."""

    def __init__(
        self, device: NumberDevice, offloader: NumberOffloader, messages: Messages
    ) -> None:
        self.device = device
        self.offloader, self.split = offloader, offloader.split
        self.engine, self.record = offloader.engine, offloader.step
        self.messages = messages
        self.before = copy.copy(self.engine.mover.counts)
        """What was moved in earlier steps."""

        self.chunks: dict[ChunkKey, NumberChunk] = {}
        """All of them, for a program may hold what they saved until the end."""

        self.have_gradients: set[int] = set()
        """Stages that have had a backward."""

        self.waited_s: defaultdict[int, float] = defaultdict(float)
        self.num_in_flight = self.most_in_flight = 0

    def begin_part(self, chunk: NumberChunk, part: BackwardPass) -> None:
        """As ``Manager.backward_pass``, when it is entered."""
        self.record.begin_part(chunk, part, self.split)
        if part is BackwardPass.WEIGHT:
            self.engine.window.resume(chunk.groups[-1])

    def end_part(self) -> None:
        """As the same, when it is left."""
        self.split.end()
        self.record.weight_pass = None
