"""One rank in numbers: it plays the tape of each action.

rank = NumberRank(order, 0, tapes[0], hardware, config)
rank.begin_step(messages)
while rank.has_more:
    rank.run_what_can()
rank.ended().peak_bytes
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence

from pp_offload._groups.plan import ChunkKey, ChunkShape, GroupKey, Plan, make_plan
from pp_offload.config import OffloadConfig
from pp_offload.pipelining import Action
from pp_offload.plan.bounds import Bounds
from pp_offload.plan.chunks import ChunkState
from pp_offload.plan.device import NumberDevice
from pp_offload.plan.host import HostPlaces
from pp_offload.plan.rules import Moved, Rules
from pp_offload.plan.tape import (
    Close,
    Drop,
    Event,
    Gone,
    Open,
    RankTapes,
    Release,
    Stretch,
    Tape,
    Use,
)
from pp_offload.simulate.hardware import Hardware
from pp_offload.simulate.messages import Message, Messages
from pp_offload.simulate.orders import PipelineOrder
from pp_offload.simulate.rank import RankStep


class NumberRank:
    """A rank at its work, step by step.

    Args:
        order: Has its actions.
        number: Which rank.
        tapes: What it does.
        hardware: Its device's.
        config: Options of its engine; None for no offload.

    Attributes:
        moved: What its engine moved, in all steps.
    """

    def __init__(
        self,
        order: PipelineOrder,
        number: int,
        tapes: RankTapes,
        hardware: Hardware,
        config: OffloadConfig | None,
    ) -> None:
        self.moved = Moved()
        self._number = number
        self._actions = order.actions[number]
        self._tapes = tapes.stages
        self._resident_bytes = tapes.resident_bytes
        self._hardware = hardware
        self._config = config
        self._vp_stage = {stage: index for index, stage in enumerate(order.stages_of(number))}
        self._bounds = Bounds(config or OffloadConfig())
        self._host = HostPlaces()
        self._plan: Plan | None = None
        self._step: _Step | None = None
        self._next = len(self._actions)

    def following(self, config: OffloadConfig) -> NumberRank:
        """The same rank after its first step, in which it knew no plan, with the plan of
        ``config``. This one stays as it is, so others may follow it.
        """
        assert self._plan is None and not self.has_more, "it has had one whole step"
        self._running.device.synchronize()  # or host memory is copied while its events are to come
        self._host.compact()  # as the next step begins with; then there is little to copy
        other = copy.copy(self)
        other.moved, other._config = copy.copy(self.moved), config
        other._bounds, other._host = self._bounds.copied(), self._host.copied()
        return other

    def begin_step(self, messages: Messages) -> None:
        """From the first action again, with the plan and the bounds that the last step taught."""
        before = self._step
        if before is not None:
            before.device.synchronize()
            self._learn(before)
        self._host.compact()
        device = NumberDevice(self._hardware)
        device.memory.add(self._resident_bytes)
        rules = Rules(device, self._host, self._bounds, self._backwards(), self.moved)
        self._step = _Step(device, rules, messages)
        self._next = 0

    def _learn(self, step: _Step) -> None:
        config = self._config
        if config is None:
            return
        if self._plan is None:
            shapes = [self._shape(key) for key in self._backwards()]
            self._plan = make_plan(tuple(shapes), config, self._number)
        left = self._hardware.memory_bytes - step.device.memory.peak
        self._bounds.choose(step.rules.watch, kept=self._plan.kept, unused_bytes=max(0, left))

    def _backwards(self) -> list[ChunkKey]:
        """Chunks in backward order."""
        return [self._key(one) for one in self._actions if one.kind == "FULL_BACKWARD"]

    def _key(self, action: Action) -> ChunkKey:
        return ChunkKey(self._vp_stage[action.stage_index], action.microbatch)

    def _shape(self, key: ChunkKey) -> ChunkShape:
        tape = self._tapes[list(self._vp_stage)[key.vp_stage]]
        names = tuple(group.name for group in tape.groups)
        sizes = [sum(tape.payloads[i].nbytes for i in group.payloads) for group in tape.groups]
        return ChunkShape(key, names, tuple(sizes))

    # Actions

    @property
    def has_more(self) -> bool:
        """Whether the step has further actions."""
        return self._next < len(self._actions)

    def run_what_can(self) -> int:
        """As many actions as have what they need; how many."""
        step, begin = self._running, self._next
        while self.has_more:
            action = self._actions[self._next]
            needed = step.messages.needed_by(*action)
            if needed is not None and not step.messages.is_there(needed):
                break
            self._next += 1
            self._run(step, action, needed)
        return self._next - begin

    @property
    def _running(self) -> _Step:
        assert self._step is not None, "begin_step() comes first"
        return self._step

    def _run(self, step: _Step, action: Action, needed: Message | None) -> None:
        messages, device = step.messages, step.device
        if needed is not None:
            waited_s = messages.receive(needed, device)
            step.waited_s[messages.sender(needed)] += waited_s
        tape, nbytes = self._tapes[action.stage_index], 0
        if action.kind == "FORWARD":
            nbytes = self._forward(step, action, tape)
        elif action.kind == "FULL_BACKWARD":
            nbytes = self._backward(step, action, tape)
        elif action.kind == "REDUCE_GRAD":
            self._play(step, tape.reduce, None)
        else:
            raise ValueError(
                f"a schedule has {action.kind} of stage {action.stage_index}, expected whole "
                "backwards; see what it costs with run_pipeline"
            )
        made = messages.made_by(*action)
        if made is not None:
            messages.sends(made, device, nbytes)

    def _forward(self, step: _Step, action: Action, tape: Tape) -> int:
        key = self._key(action)
        chunk = step.chunks[key] = ChunkState(tape, key)
        self._play(step, tape.forward, chunk)
        if not tape.groups:
            step.rules.queue.skip(key)
        step.most_in_flight = max(step.most_in_flight, len(step.chunks))
        return tape.sent_bytes

    def _backward(self, step: _Step, action: Action, tape: Tape) -> int:
        key = self._key(action)
        step.rules.begin_backward(key)
        is_first = action.stage_index not in step.have_gradients
        step.have_gradients.add(action.stage_index)
        self._play(step, tape.first_backward if is_first else tape.backward, step.chunks[key])
        del step.chunks[key]
        return tape.sent_back_bytes

    def _play(self, step: _Step, events: Sequence[Event], chunk: ChunkState | None) -> None:
        device = step.device
        for event in events:
            if isinstance(event, Stretch):
                device.run(event.seconds)
                device.memory.pass_by(event.nbytes, event.rise)
            else:
                assert chunk is not None, "nothing is saved when gradients are reduced"
                self._tell(step.rules, event, chunk)

    def _tell(self, rules: Rules, event: Event, chunk: ChunkState) -> None:
        match event:
            case Open():
                rules.open(chunk)
            case Close(position):
                rules.close(chunk, position, keeps=self._keeps(rules, chunk, position))
            case Use(payload):
                rules.use(chunk, payload)
            case Drop(source):
                rules.drop(chunk.sources[source])
            case Release(payload):
                rules.release(chunk.saved[payload])
            case Gone(payload):
                rules.gone(chunk.saved[payload])

    def _keeps(self, rules: Rules, chunk: ChunkState, position: int) -> bool:
        """What ``Chunk.may_leave`` does not let go."""
        if self._config is None:
            return True
        plan = self._plan or Plan()
        key, name = GroupKey(chunk.key, position), chunk.groups[position].name
        if plan.keeps(key, name):
            return True
        return plan.is_last_of_its_name(key, name) and rules.is_next(chunk)

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
            host_peak_bytes=self._host.peak_bytes,
            bytes_offloaded=self.moved.bytes_offloaded - step.sent_before,
            offload_s=step.device.d2h.busy_s,
            num_in_flight=step.most_in_flight,
        )


class _Step:
    """What is of one step."""

    def __init__(self, device: NumberDevice, rules: Rules, messages: Messages) -> None:
        self.device = device
        self.rules = rules
        self.messages = messages
        self.sent_before = rules.moved.bytes_offloaded
        self.chunks: dict[ChunkKey, ChunkState] = {}
        """Those whose backward is to come."""

        self.have_gradients: set[int] = set()
        """Stages that have had a backward."""

        self.waited_s: defaultdict[int, float] = defaultdict(float)
        self.most_in_flight = 0
