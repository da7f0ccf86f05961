"""Recording of tapes: a rank runs two microbatches on a virtual device whose copies take no time.

    tapes = record(order, work, DEVICES["H100"])
    tapes[0].stages[0].forward

There everything leaves at its commit and comes back when it is asked for, so what is freed then is
what the program had let go of.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from math import inf
from typing import NamedTuple, TypeVar

from pp_offload._common.garbage import collector_off
from pp_offload._core.group import Group
from pp_offload._core.keys import ChunkKey
from pp_offload._groups.plan import Plan
from pp_offload._groups.split_backward import SplitBackward
from pp_offload._megatron.current import use_manager
from pp_offload._megatron.manager import PipelineOffloadManager
from pp_offload._memory.budget import UNLIMITED, as_another_process
from pp_offload.config import OffloadConfig, without_plan
from pp_offload.plan.recorder import ChunkNotes, Raw, Recorder
from pp_offload.plan.tape import Backward, Event, GroupTape, RankTapes, Stretch, Tape, Update
from pp_offload.simulate.clocks import VirtualStream
from pp_offload.simulate.device import VirtualBackend
from pp_offload.simulate.hardware import Hardware
from pp_offload.simulate.orders import PipelineOrder
from pp_offload.simulate.stages import Modules, RankWork, Work

_T = TypeVar("_T")


def record(
    order: PipelineOrder, work: Work, hardware: Hardware, config: OffloadConfig | None = None
) -> list[RankTapes]:
    """Record the tapes of all ranks.

    Args:
        order: Stages of each rank, and number of microbatches.
        work: Work of the stages.
        hardware: Device, which gives operators their times.
        config: Says which tensors may leave, and whether a disk is among the tiers;
            :func:`choose` takes the same.

    Raises:
        ValueError: Something is not known to :func:`predict`: a view that is copied without the
            rest of its storage, or bytes that several microbatches or stages save; other streams,
            or copies of the program's own; or the first two microbatches differ.
    """
    still = replace(
        hardware,
        link_bytes_per_s=inf,
        both_links_bytes_per_s=None,
        host_bytes_per_s=None,
        copy_latency_s=0.0,
        launch_s=0.0,
    )
    options = replace(
        without_plan(config or OffloadConfig()),
        host_budget_bytes=UNLIMITED,
        tiers=("host",),
        disk_dir=None,
        verify=False,
    )
    has_disk = config is not None and config.tiers != ("host",)
    work.prepare(order, VirtualBackend(hardware))
    variants: list[_Variants] = []
    for rank in range(order.num_ranks):
        variants.append(_Variants(order, work, still, options, rank, has_disk))
        variants[-1].find_equal(variants[:-1])
    return [each(0) for each in variants]


class _Variants:
    """Recordings of a rank with more or fewer layers recomputed, each made at its first use."""

    def __init__(
        self,
        order: PipelineOrder,
        work: Work,
        hardware: Hardware,
        config: OffloadConfig,
        rank: int,
        has_disk: bool,
    ) -> None:
        self._what = order, work, hardware, config, rank, has_disk
        self._layers = _layers_of(work, order.stages_of(rank))
        self._recorded: dict[int, RankTapes] = {}
        self._equal: _Variants | None = None

    def find_equal(self, variants: Sequence[_Variants]) -> None:
        """Share the recordings of a rank that does the same: most ranks of a model are equal."""
        tapes = self(0)
        for variant in variants:
            is_equal = replace(variant(0), stages={}) == replace(tapes, stages={})
            if is_equal and [*variant(0).stages.values()] == [*tapes.stages.values()]:
                names = [[name for _, name in rank._layers] for rank in (self, variant)]
                if names[0] == names[1]:
                    self._equal = variant
                    return

    def __call__(self, num: int) -> RankTapes:
        if num not in self._recorded and self._equal is not None:
            tapes = self._equal(num)
            stages = dict(zip(self._recorded[0].stages, tapes.stages.values(), strict=True))
            self._recorded[num] = replace(tapes, stages=stages, variant=self)
        if num not in self._recorded:
            chosen = spread(self._layers, num)
            order, work, *_, rank, _ = self._what
            names = {
                stage: tuple(name for layer_stage, name in chosen if layer_stage == stage)
                for stage in order.stages_of(rank)
            }
            with work.recomputing(names) if isinstance(work, Modules) else nullcontext():
                tapes = _record_rank(*self._what, self._recorded.get(0))
            self._recorded[num] = replace(
                tapes,
                recomputed=tuple(names.values()),
                num_layers=len(self._layers),
                variant=self,
            )
        return self._recorded[num]


def _layers_of(work: Work, stages: Sequence[int]) -> list[tuple[int, str]]:
    """List stage and name of each layer that may be recomputed, in forward order."""
    if not isinstance(work, Modules):
        return []
    return [(stage, name) for stage in stages for name in work.layers_of(stage)]


def spread(layers: Sequence[_T], num: int) -> list[_T]:
    """Choose ``num`` layers, spread evenly: what is sent away in between has more time."""
    return [layers[index * len(layers) // num] for index in range(num)]


def _record_rank(
    order: PipelineOrder,
    work: Work,
    hardware: Hardware,
    config: OffloadConfig,
    rank: int,
    has_disk: bool,
    without: RankTapes | None,
) -> RankTapes:
    """Record the tapes of one rank.

    Args:
        order, work, hardware, config: As for :func:`record`.
        rank: Its number.
        has_disk: Whether some of what leaves may go there, in what is predicted.
        without: The same rank where no layer is recomputed, if some are: optimizers do the same.
    """
    backend = _OneStream(hardware, is_blocking=True)
    recorder = Recorder(backend)
    backend.memory = recorder.memory
    with as_another_process():
        manager = PipelineOffloadManager(config=config, backend=backend)
    recipes = manager.offloader.engine.recipes
    if recipes is not None:
        recipes.may_reach = not has_disk
    try:
        with use_manager(manager):
            rank_work = work.on(order, rank, backend)
            if without is not None:  # groups are idle in layers that are recomputed
                manager.idle_groups.num_steps_left = 0
            try:
                rank_work.begin_step()
                _run_once(rank_work, order.stages_of(rank))
                made = Update()
                if without is None:
                    made = _updates(rank_work, order.stages_of(rank), recorder)
                rank_work.begin_step()
                # From now on stages run alone, without groups of others.
                manager.idle_groups.num_steps_left = 0
                gc.collect()
                resident = hardware.workspace_bytes + backend.memory.live_bytes - made.state_bytes
                manager.offloader.observers.add(recorder)
                with collector_off():
                    stages = _Recording(order, rank, rank_work, manager, recorder).tapes()
                manager.offloader.observers.remove(recorder)
                _check_copies(backend, manager)
            finally:
                rank_work.close()
    finally:
        manager.retire()
    return RankTapes(
        stages,
        resident,
        made if without is None else without.update,
        min_offloaded_tensor_size=config.min_offloaded_tensor_size,
    )


def _updates(work: RankWork, stages: Sequence[int], recorder: Recorder) -> Update:
    """Record the first update, when all gradients exist, and the second one."""
    recorder.taken()
    work.update()
    first = recorder.taken()
    if not first:
        return Update()
    work.begin_step()
    _run_once(work, stages)
    recorder.taken()
    work.update()
    return Update(*[_stretches(recorder.told(raw)) for raw in (first, recorder.taken())])


def _stretches(events: Sequence[Event]) -> tuple[Stretch, ...]:
    stretches = tuple(event for event in events if isinstance(event, Stretch))
    assert len(stretches) == len(events), "an optimizer has no groups"
    return stretches


def _run_once(work: RankWork, stages: Sequence[int]) -> None:
    """Run a microbatch, which makes all that is made once."""
    for run in neighbours(stages):
        for stage in run:
            work.forward(stage, 0)
            if stage + 1 in run:
                work.hand_over("FORWARD", stage, 0)
        for stage in reversed(run):
            work.backward("FULL_BACKWARD", stage, 0)
            if stage - 1 in run:
                work.hand_over("FULL_BACKWARD", stage, 0)


class _AllAnew(SplitBackward):
    """Split backward that reloads nothing ahead: see :class:`Recorder`."""

    def _expect_second(self, key: ChunkKey, groups: Sequence[Group]) -> None:
        """Expect no use in the second part."""


class _OneStream(VirtualBackend):
    """Device on which a program computes on one stream."""

    def new_stream(self, name: str = "") -> VirtualStream:
        if hasattr(self, "h2d"):  # its own are there
            raise ValueError(
                "the program makes a stream, expected one whose operators are on one; see what it "
                "costs with run_pipeline"
            )
        return super().new_stream(name)


def _check_copies(backend: VirtualBackend, manager: PipelineOffloadManager) -> None:
    link, moved = backend.link, manager.statistics()
    if (link.bytes_to_host, link.bytes_to_device) != (moved.bytes_offloaded, moved.bytes_reloaded):
        raise ValueError(
            f"{link.bytes_to_host} bytes went to the host and {link.bytes_to_device} came back, of "
            f"which the engine moved {moved.bytes_offloaded} and {moved.bytes_reloaded}; expected "
            "a program without copies of its own: see what it costs with run_pipeline"
        )


class _Recording:
    """Recording of a rank. Adjacent stages run together, because they hand over tensors.

    Args:
        order: Actions of all ranks; backwards may come in two parts.
        rank: Number of the rank.
        work: Work of the rank.
        manager: Manager of the rank.
        recorder: Recorder of the work and of the engine.
    """

    def __init__(
        self,
        order: PipelineOrder,
        rank: int,
        work: RankWork,
        manager: PipelineOffloadManager,
        recorder: Recorder,
    ) -> None:
        self._stages = order.stages_of(rank)
        self._kinds = {(action.kind, action.stage_index) for action in order.actions[rank]}
        self._num = min(2, order.num_microbatches)
        self._work = work
        self._manager = manager
        self._recorder = recorder

    def tapes(self) -> dict[int, Tape]:
        """Record the tape of each stage."""
        tapes: dict[int, Tape] = {}
        for run in neighbours(self._stages):
            whole = self._played(run, "FULL_BACKWARD")
            split = self._played(run, "BACKWARD_INPUT")
            tapes |= {stage: _tape(whole.get(stage), split.get(stage)) for stage in run}
        return tapes

    def _played(self, run: Sequence[int], kind: str) -> dict[int, _Played]:
        """Run two microbatches of the stages with such backwards, and return their notes."""
        with_these = [stage for stage in run if (kind, stage) in self._kinds]
        if not with_these:
            return {}
        self._begin_step()
        notes = {stage: _StageNotes() for stage in run}
        for microbatch in range(self._num):
            for stage in run:
                self._forward(run, stage, microbatch, notes[stage])
        for microbatch in range(self._num):
            for stage in reversed(run):
                self._backward(run, stage, microbatch, kind, notes[stage])
        for stage in run:
            self._work.reduce(stage)
            notes[stage].reduce = self._recorder.taken()
        return {stage: notes[stage].told(stage, self._recorder) for stage in with_these}

    def _begin_step(self) -> None:
        """Begin a step in which everything leaves, and nothing is reloaded ahead."""
        self._work.begin_step()
        offloader = self._manager.offloader
        offloader.plan = Plan()
        split = offloader.split
        chunks = frozenset[ChunkKey]() if split is None else split.chunks
        offloader.split = _AllAnew(chunks, is_keeping=False)
        self._recorder.forget()

    def _forward(self, run: Sequence[int], stage: int, microbatch: int, notes: _StageNotes) -> None:
        notes.chunks.append(self._recorder.begin_chunk())
        notes.sent_bytes = self._work.forward(stage, microbatch)
        if stage + 1 in run:
            self._work.hand_over("FORWARD", stage, microbatch)
        notes.forwards.append(self._recorder.taken())

    def _backward(
        self, run: Sequence[int], stage: int, microbatch: int, kind: str, notes: _StageNotes
    ) -> None:
        self._recorder.chunk = notes.chunks[microbatch]
        notes.sent_back_bytes = self._work.backward(kind, stage, microbatch)
        if stage - 1 in run:
            self._work.hand_over(kind, stage, microbatch)
        if kind == "BACKWARD_INPUT":
            notes.inputs.append(self._recorder.taken())
            self._work.weight(stage, microbatch)
        notes.lasts.append(self._recorder.taken())


def neighbours(stages: Sequence[int]) -> list[list[int]]:
    """Divide a rank's stages into runs of adjacent stages."""
    runs: list[list[int]] = []
    for stage in stages:
        if runs and runs[-1][-1] + 1 == stage:
            runs[-1].append(stage)
        else:
            runs.append([stage])
    return runs


class _StageNotes:
    """Notes of a stage, by microbatch."""

    def __init__(self) -> None:
        self.chunks: list[ChunkNotes] = []
        self.forwards: list[list[Raw]] = []
        self.inputs: list[list[Raw]] = []
        """First parts of backwards."""

        self.lasts: list[list[Raw]] = []
        """Second parts, or backwards in one."""

        self.reduce: list[Raw] = []
        self.sent_bytes = self.sent_back_bytes = 0

    def told(self, stage: int, recorder: Recorder) -> _Played:
        """Turn the notes into events, when all backwards are over.

        Raises:
            ValueError: Microbatches have other groups.
        """
        first, last, events_of = self.chunks[0], self.chunks[-1], recorder.told
        if first.groups != last.groups or first.payloads != last.payloads:
            raise ValueError(
                f"the groups of stage {stage} differ between its first two microbatches, expected "
                "the same names and sizes"
            )
        groups = [
            group._replace(copies=first.copies.get(position))
            for position, group in enumerate(last.groups)
        ]
        return _Played(
            tuple(groups),
            last,
            events_of(self.forwards[-1]),
            events_of(self.inputs[-1]) if self.inputs else (),
            Backward(events_of(self.lasts[0]), events_of(self.lasts[-1])),
            events_of(self.reduce),
            self.sent_bytes,
            self.sent_back_bytes,
        )


class _Played(NamedTuple):
    """Events of the last microbatch; and of the first one, for the last part of its backward."""

    groups: tuple[GroupTape, ...]
    chunk: ChunkNotes
    forward: tuple[Event, ...]
    input_part: tuple[Event, ...]
    last_part: Backward
    reduce: tuple[Event, ...]
    sent_bytes: int
    sent_back_bytes: int


def _tape(whole: _Played | None, split: _Played | None) -> Tape:
    """Make the tape of a stage from its events with backwards in one part, and in two."""
    last = split or whole
    assert last is not None, "each stage of a schedule has backwards"
    return Tape(
        groups=last.groups,
        payloads=last.chunk.payloads_of_groups(),
        source_bytes=tuple(last.chunk.source_bytes),
        forward=last.forward,
        backward=Backward() if whole is None else whole.last_part,
        input_part=() if split is None else split.input_part,
        weight_part=Backward() if split is None else split.last_part,
        reduce=last.reduce,
        sent_bytes=last.sent_bytes,
        sent_back_bytes=last.sent_back_bytes,
    )
