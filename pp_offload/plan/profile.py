"""Profile of a pipeline: bytes and times of its groups and stages, read from its tapes.

    figures = profile(record(order, work, DEVICES["H100"]), DEVICES["H100"])
    print(profile_table(figures))
    figures.groups[0].nbytes, figures.stages[0].forward.ms

No figure is estimated from sizes of a model. Recomputation is listed by stage: a layer is
recomputed whole, and tapes do not say which groups are in the layer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from operator import add, attrgetter

from pp_offload.plan.numbers import NumberDevice
from pp_offload.plan.tape import Event, Mark, RankTapes, Repeated, Stretch, Tape
from pp_offload.simulate.clocks import Link
from pp_offload.simulate.hardware import Hardware


@dataclass(frozen=True)
class GroupProfile:
    """A group, for one microbatch."""

    name: str

    layer: int
    """Number of groups of this name before the group in its stage."""

    stage: int

    nbytes: int
    """Bytes that the group may send, without bytes that recipes compute again."""

    forward_ms: float
    """Time of operators while no other group was open inside the group."""

    backward_ms: float
    """Time of operators after backward has asked for a tensor of the group, until backward asks for
    a tensor of another group.
    """

    copy_ms: float
    """Time of the copy to the host, with no other copy on the link."""

    @property
    def bytes_per_ms(self) -> float:
        """Bytes for each millisecond of the group's forward; 0 if the forward takes no time."""
        return self.nbytes / self.forward_ms if self.forward_ms else 0.0


@dataclass(frozen=True)
class ActionProfile:
    """A forward or backward of one microbatch without offload, or an optimizer's step."""

    resident_bytes: int
    """Device bytes after the action, minus those before; below 0 if it frees memory."""

    transient_peak_bytes: int
    """Highest device bytes during the action, minus those before."""

    ms: float
    """Time of the operators."""


@dataclass(frozen=True)
class StageProfile:
    """A stage, for one microbatch."""

    stage: int
    rank: int
    forward: ActionProfile
    first_backward: ActionProfile
    """First backward of a step, which makes the gradients that later ones add to."""

    backward: ActionProfile
    num_layers: int
    """Number of layers that may be recomputed. A second recording has all of them recomputed."""

    recompute_ms: float | None
    """Time that each recomputed layer adds to backward, on average; None without such layers."""

    recompute_frees_bytes: float | None
    """Device bytes that each such layer spares a microbatch until its backward, on average."""


@dataclass(frozen=True)
class Profile:
    """Profile of a pipeline: its groups, stages and optimizers."""

    groups: tuple[GroupProfile, ...]
    """Groups by stage, in forward order."""

    stages: tuple[StageProfile, ...]
    resident_bytes: tuple[int, ...]
    """Bytes of each rank at the begin of a step: parameters, and buffers of the schedule."""

    link_bytes_per_ms: float
    """Rate of copies in one direction."""

    optimizers: tuple[ActionProfile | None, ...] = ()
    """Optimizer of each rank: the state that it keeps, and the bytes and time of its step. None for
    a rank without an optimizer.
    """


def profile(tapes: Sequence[RankTapes], hardware: Hardware) -> Profile:
    """Read the profile of a pipeline from its tapes.

    Args:
        tapes: Tapes by rank; see :func:`record`. If layers may be recomputed, the ranks are also
            recorded with all of them recomputed.
        hardware: Hardware with the link.

    Raises:
        TypeError: ``hardware`` is no :class:`Hardware`.
    """
    groups, stages = list[GroupProfile](), list[StageProfile]()
    link = NumberDevice(hardware).link
    for rank, rank_tapes in enumerate(tapes):
        every = rank_tapes.recomputing(rank_tapes.num_layers)
        layers = chain(every.recomputed, repeat(()))  # by stage; tapes made by hand have none
        for (stage, tape), names in zip(sorted(rank_tapes.stages.items()), layers, strict=False):
            groups += _groups(stage, tape, link)
            stages.append(_stage(stage, rank, tape, every.stages[stage], len(names)))
    return Profile(
        tuple(sorted(groups, key=attrgetter("stage"))),
        tuple(sorted(stages, key=attrgetter("stage"))),
        tuple(rank_tapes.resident_bytes for rank_tapes in tapes),
        hardware.link_bytes_per_s / 1e3,
        tuple(map(_optimizer, tapes)),
    )


def _optimizer(tapes: RankTapes) -> ActionProfile | None:
    """Profile an optimizer's step, with the state that it made in the first one."""
    later = tapes.update.later
    return replace(_action(later), resident_bytes=tapes.state_bytes) if later else None


def _groups(stage: int, tape: Tape, link: Link) -> Iterator[GroupProfile]:
    forward_s, backward_s = _seconds(tape)
    names = [group.name for group in tape.groups]
    for position, group in enumerate(tape.groups):
        copies_s = [link.seconds(each.nbytes, to_host=True) for each in tape.copied(group)]
        yield GroupProfile(
            name=group.name,
            layer=names[:position].count(group.name),
            stage=stage,
            nbytes=tape.nbytes(group),
            forward_ms=forward_s[position] * 1e3,
            backward_ms=backward_s[position] * 1e3,
            copy_ms=sum(copies_s) * 1e3,
        )


def _seconds(tape: Tape) -> tuple[Mapping[int, float], Mapping[int, float]]:
    """Sum times of operators by position of the group, as :class:`GroupProfile` has them."""
    forward_s, backward_s = defaultdict[int, float](float), defaultdict[int, float](float)
    are_open: list[int] = []
    for event in tape.forward:
        match event:
            case Mark("begin", position):
                are_open.append(position)
            case Mark("end", position):
                are_open.remove(position)
            case Stretch() if are_open:
                forward_s[are_open[-1]] += sum(event.seconds)
    group_of = {payload: i for i, group in enumerate(tape.groups) for payload in group.payloads}
    asked: int | None = None
    for event in _backward(tape).later:
        match event:
            case Mark("use", payload):
                asked = group_of[payload]
            case Stretch() if asked is not None:
                backward_s[asked] += sum(event.seconds)
    return forward_s, backward_s


def _stage(stage: int, rank: int, tape: Tape, recomputed: Tape, num_layers: int) -> StageProfile:
    actions = _actions(tape)
    forward, _, backward = actions
    if not num_layers:
        return StageProfile(stage, rank, *actions, num_layers, None, None)
    other_forward, _, other_backward = _actions(recomputed)
    recompute_ms = (other_backward.ms - backward.ms) / num_layers
    frees_bytes = (forward.resident_bytes - other_forward.resident_bytes) / num_layers
    return StageProfile(stage, rank, *actions, num_layers, recompute_ms, frees_bytes)


def _actions(tape: Tape) -> tuple[ActionProfile, ActionProfile, ActionProfile]:
    """Profile forward, first backward and later ones of a microbatch that offloads nothing."""
    holders = Counter(range(len(tape.source_bytes)))  # of each source
    holders.update(payload.source for payload in tape.payloads if payload.num_uses)
    forward = _action(_with_frees(tape, tape.forward, holders))
    first, later = (_action(_with_frees(tape, part, holders.copy())) for part in _backward(tape))
    return forward, first, later


def _with_frees(tape: Tape, events: Iterable[Event], holders: Counter[int]) -> Iterator[Event]:
    """Yield events, and a stretch that frees a source when its last holder goes."""
    for event in events:
        yield event
        if isinstance(event, Mark) and event.kind in ("drop", "gone"):
            is_source = event.kind == "drop"
            source = event.number if is_source else tape.payloads[event.number].source
            holders[source] -= 1
            if not holders[source]:
                yield Stretch((), -tape.source_bytes[source], 0)


def _backward(tape: Tape) -> Repeated:
    """Return the events of a whole backward; both parts if it comes in two."""
    parts = tape.backward
    if "FULL_BACKWARD" in parts:
        return parts["FULL_BACKWARD"]
    return Repeated(*map(add, parts["BACKWARD_INPUT"], parts["BACKWARD_WEIGHT"]))


def _action(events: Iterable[Event]) -> ActionProfile:
    """Sum the bytes and times of stretches."""
    whole = Stretch.joined(events)
    return ActionProfile(whole.nbytes, whole.rise, sum(whole.seconds) * 1e3)
