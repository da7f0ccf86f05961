"""What a pipeline is made of: bytes and times of its groups and stages, read from its tapes.

    figures = profile(record(order, work, DEVICES["H100"]), DEVICES["H100"])
    print(profile_table(figures))
    figures.groups[0].nbytes, figures.stages[0].forward.ms

Nothing is reckoned from sizes of a model. Recomputation stands with stages: a layer is recomputed
whole, and tapes do not say which groups are in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pp_offload._common.checks import check_kind
from pp_offload.plan.device import Bytes, NumberDevice
from pp_offload.plan.staying import staying
from pp_offload.plan.tape import (
    Backward,
    Close,
    Event,
    Open,
    RankTapes,
    Stretch,
    Tape,
    Update,
    Use,
)
from pp_offload.simulate.hardware import Hardware


@dataclass(frozen=True)
class GroupProfile:
    """A group, for one microbatch."""

    name: str

    layer: int
    """How many groups of this name are before it in its stage."""

    stage: int

    nbytes: int
    """What it may send away: without what recipes compute again."""

    shared_with: tuple[str, ...]
    """Names of the groups that save some of the same bytes, which are copied once."""

    forward_ms: float
    """Of operators while no other group was open inside it."""

    backward_ms: float
    """Of operators after backward has asked for something that it saved, until it asks for
    something of another group. What was asked for once is taken to be for the operators behind.
    """

    copy_ms: float
    """Of its bytes, to the host, with nothing else on the link."""

    @property
    def bytes_per_ms(self) -> float:
        """What it saves for each millisecond of its forward; 0 where that takes no time."""
        return self.nbytes / self.forward_ms if self.forward_ms else 0.0


@dataclass(frozen=True)
class GroupKind:
    """Groups that are alike but for the layer and the stage."""

    first: GroupProfile
    num: int
    stages: tuple[int, ...]
    """Which have some."""


@dataclass(frozen=True)
class ActionProfile:
    """A forward or a backward of one microbatch where nothing leaves, or an optimizer's step."""

    resident_bytes: int
    """What the device holds more when it has ended; below 0 if that is less."""

    transient_peak_bytes: int
    """The most that the device holds more on the way."""

    ms: float
    """Of its operators."""


@dataclass(frozen=True)
class StageProfile:
    """A stage, for one microbatch."""

    stage: int
    rank: int
    forward: ActionProfile
    first_backward: ActionProfile
    """Of a step: it makes the gradients that the others add to."""

    backward: ActionProfile
    num_layers: int
    """Which may be recomputed; for these, all recomputed was recorded, too."""

    recompute_ms: float | None
    """How much longer a backward is for each layer that it recomputes, on average. None without
    such layers.
    """

    recompute_frees_bytes: float | None
    """How much less a microbatch holds for each of them until its backward, on average."""


@dataclass(frozen=True)
class Profile:
    """What a pipeline is made of."""

    groups: tuple[GroupProfile, ...]
    """By stage, in forward order."""

    stages: tuple[StageProfile, ...]
    resident_bytes: tuple[int, ...]
    """Of each rank at the begin of a step: parameters, and what the schedule allocates."""

    link_bytes_per_ms: float
    """What copies in one direction reach."""

    optimizers: tuple[ActionProfile | None, ...] = ()
    """By rank, what ends a step: the state that it keeps, and what it takes on the way. None where
    there is none.
    """

    def kinds(self) -> list[GroupKind]:
        """Equal groups as one, in the order in which the first of each comes."""
        alike: dict[GroupProfile, list[GroupProfile]] = {}
        for group in self.groups:
            alike.setdefault(_kind(group), []).append(group)
        return [
            GroupKind(groups[0], len(groups), tuple(sorted({each.stage for each in groups})))
            for groups in alike.values()
        ]


def _kind(group: GroupProfile) -> GroupProfile:
    """Without its place, and in whole nanoseconds: equal operators differ by what rounding leaves
    of the clock.
    """
    forward_ms, backward_ms = round(group.forward_ms, 6), round(group.backward_ms, 6)
    return replace(group, layer=0, stage=0, forward_ms=forward_ms, backward_ms=backward_ms)


def profile(tapes: Sequence[RankTapes], hardware: Hardware) -> Profile:
    """What is in the tapes.

    Args:
        tapes: Rank by rank; see :func:`record`. Where layers may be recomputed, the ranks are
            recorded with all of them recomputed, too.
        hardware: Has the link.

    Raises:
        TypeError: ``hardware`` is no :class:`Hardware`.
    """
    check_kind("hardware", hardware, Hardware, "a Hardware", 'write DEVICES["H100"]')
    groups: dict[int, list[GroupProfile]] = {}
    stages: dict[int, StageProfile] = {}
    for rank, rank_tapes in enumerate(tapes):
        every = rank_tapes.recomputing(rank_tapes.num_layers)
        layers = dict(zip(sorted(every.stages), every.recomputed, strict=False))
        for stage, tape in rank_tapes.stages.items():
            groups[stage] = list(_groups(stage, tape, hardware))
            stages[stage] = _stage(
                *(stage, rank, tape), every.stages[stage], len(layers.get(stage, ()))
            )
    return Profile(
        tuple(group for stage in sorted(groups) for group in groups[stage]),
        tuple(stages[stage] for stage in sorted(stages)),
        tuple(rank_tapes.resident_bytes for rank_tapes in tapes),
        hardware.d2h_rate / 1e3,
        tuple(_optimizer(rank_tapes.update) for rank_tapes in tapes),
    )


def _optimizer(update: Update) -> ActionProfile | None:
    """What it takes in a step, beside the state that it made in the first one."""
    return (
        replace(_action(update.later), resident_bytes=update.state_bytes) if update.later else None
    )


def _groups(stage: int, tape: Tape, hardware: Hardware) -> Iterator[GroupProfile]:
    forward, backward = _forward_seconds(tape), _backward_seconds(tape)
    shared = _shared(tape)
    num: Counter[str] = Counter()
    for position, group in enumerate(tape.groups):
        device = NumberDevice(hardware)
        payloads = [tape.payloads[index] for index in group.payloads]
        payloads = [payload for payload in payloads if payload.again is None]
        device.copy(device.d2h, payloads, payloads, group.name)
        yield GroupProfile(
            name=group.name,
            layer=num[group.name],
            stage=stage,
            nbytes=tape.nbytes(group),
            shared_with=shared[position],
            forward_ms=forward[position] * 1e3,
            backward_ms=backward[position] * 1e3,
            copy_ms=device.offload_s * 1e3,
        )
        num[group.name] += 1


def _forward_seconds(tape: Tape) -> list[float]:
    """Of operators, by position of the innermost group that is open."""
    seconds = [0.0] * len(tape.groups)
    are_open: list[int] = []
    for event in tape.forward:
        match event:
            case Open(position):
                are_open.append(position)
            case Close(position):
                are_open.remove(position)
            case Stretch() if are_open:
                seconds[are_open[-1]] += sum(event.seconds)
    return seconds


def _backward_seconds(tape: Tape) -> list[float]:
    """Of operators, by position of the group that backward has asked last."""
    seconds = [0.0] * len(tape.groups)
    group_of = {payload: i for i, group in enumerate(tape.groups) for payload in group.payloads}
    asked: int | None = None
    for event in _backward(tape).later:
        match event:
            case Use(payload):
                asked = group_of[payload]
            case Stretch() if asked is not None:
                seconds[asked] += sum(event.seconds)
    return seconds


def _shared(tape: Tape) -> list[tuple[str, ...]]:
    """By position, names of the groups with which a group shares copies."""
    savers: dict[tuple[int, int], set[int]] = {}
    for position, group in enumerate(tape.groups):
        for payload in (tape.payloads[index] for index in group.payloads):
            if payload.version is not None:
                savers.setdefault((payload.source, payload.version), set()).add(position)
    names_of: list[set[str]] = [set() for _ in tape.groups]
    for positions in savers.values():
        for position in positions:
            names_of[position] |= {tape.groups[i].name for i in positions - {position}}
    return [tuple(sorted(names)) for names in names_of]


def _stage(stage: int, rank: int, tape: Tape, recomputed: Tape, num_layers: int) -> StageProfile:
    forward, first, backward = _actions(tape)
    other_forward, _, other_backward = _actions(recomputed)
    recompute_ms = other_backward.ms - backward.ms
    frees_bytes = forward.resident_bytes - other_forward.resident_bytes
    return StageProfile(
        stage=stage,
        rank=rank,
        forward=forward,
        first_backward=first,
        backward=backward,
        num_layers=num_layers,
        recompute_ms=recompute_ms / num_layers if num_layers else None,
        recompute_frees_bytes=frees_bytes / num_layers if num_layers else None,
    )


def _actions(tape: Tape) -> tuple[ActionProfile, ActionProfile, ActionProfile]:
    """Forward, first backward and any other, of a microbatch that sends nothing away."""
    still = staying(tape)
    backward = _backward(still)
    return _action(still.forward), _action(backward.first), _action(backward.later)


def _backward(tape: Tape) -> Backward:
    """What makes all gradients; both parts, where it comes in two."""
    first, weights = tape.input_part, tape.weight_part
    in_two = Backward((*first, *weights.first), (*first, *weights.later))
    return tape.backward if tape.backward.later else in_two


def _action(events: Sequence[Event]) -> ActionProfile:
    """What stretches cost together."""
    memory, seconds = Bytes(), 0.0
    for event in events:
        assert isinstance(event, Stretch), "nothing leaves"
        memory.pass_by(event.nbytes, event.rise)
        seconds += sum(event.seconds)
    return ActionProfile(memory.live, memory.peak, seconds * 1e3)
