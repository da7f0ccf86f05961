"""Recording of tapes: a rank runs two microbatches on a virtual device whose copies take no time.

    tapes = record(order, work, DEVICES["H100"])
    tapes[0].stages[0].forward

There each group leaves at its commit, and a payload is reloaded at its use. So memory that is freed
at these times had no other reference in the program.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf
from typing import Any

from pp_offload._common.processes import collector_off
from pp_offload._core.group import ChunkKey, Group
from pp_offload._groups.manager import Manager
from pp_offload._groups.plan import Plan
from pp_offload._groups.split_backward import SplitBackward
from pp_offload._megatron.manager import use_manager
from pp_offload.config import OffloadConfig, without_plan
from pp_offload.plan.recorder import ChunkNotes, Recorder
from pp_offload.plan.tape import RankTapes, Repeated, Stretch, Tape
from pp_offload.simulate.device import VirtualBackend
from pp_offload.simulate.hardware import Hardware
from pp_offload.simulate.pipeline import running_rank
from pp_offload.simulate.schedules import PipelineOrder
from pp_offload.simulate.stages import RankWork, Work


def record(
    order: PipelineOrder, work: Work, hardware: Hardware, config: OffloadConfig | None = None
) -> list[RankTapes]:
    """Record the tapes of all ranks.

    Args:
        order: Stages of each rank, and number of microbatches.
        work: Work of the stages.
        hardware: Device whose numbers give operators their times.
        config: Options of which tensors may leave; give :func:`choose` the same.

    Raises:
        ValueError: :func:`predict` does not support the program: several microbatches or stages
            save the same bytes, the program makes copies of its own, or the first two microbatches
            differ.
    """
    still = replace(hardware, link_bytes_per_s=inf, both_links_bytes_per_s=None)
    still = replace(still, copy_latency_s=0.0, launch_s=0.0)
    options = replace(without_plan(config or OffloadConfig()), host_budget_bytes=None, verify=False)
    work.prepare(order, VirtualBackend(hardware))

    def tapes_of(rank: int, update: Repeated | None) -> RankTapes:
        backend = VirtualBackend(still, is_blocking=True)
        recorder = Recorder(backend)
        with running_rank(order, work, rank, backend, options) as (manager, rank_work):
            with use_manager(manager):
                return _Recording(order, rank, manager, rank_work, recorder).tapes(update)

    variants: list[_Variants] = []
    for rank in range(order.num_ranks):
        variants.append(_Variants(order.stages_of(rank), work, partial(tapes_of, rank), variants))
    return [each(0) for each in variants]


class _Variants:
    """Recordings of a rank by number of recomputed layers, those of an equal rank if one exists."""

    def __init__(
        self, stages: Sequence[int], work: Work, tapes_of: Any, others: Iterable[_Variants]
    ) -> None:
        self._stages, self._work, self._tapes_of = stages, work, tapes_of
        # Stage and name of each layer that may be recomputed, in forward order.
        self._layers = [(stage, name) for stage in stages for name in work.layers_of(stage)]
        tapes, names = self._record(0), [name for _, name in self._layers]
        self._recorded = {0: tapes}
        # Tapes and names of layers, which are equal for ranks with equal work.
        self._key = replace(tapes, stages={}), [*tapes.stages.values()], names
        self._equal = next((each for each in others if each._key == self._key), None)

    def __call__(self, num: int) -> RankTapes:
        if num not in self._recorded and self._equal is not None:
            tapes = self._equal(num)
            own = dict(zip(self._stages, tapes.stages.values(), strict=True))
            self._recorded[num] = replace(tapes, stages=own, variant=self)
        elif num not in self._recorded:
            self._recorded[num] = self._record(num)
        return self._recorded[num]

    def _record(self, num: int) -> RankTapes:
        layers, stages = self._layers, self._stages
        # Spread evenly, so that copies of groups in between have more time.
        chosen = [layers[index * len(layers) // num] for index in range(num)]
        names = {stage: tuple(name for at, name in chosen if at == stage) for stage in stages}
        with self._work.recomputing(names):
            tapes = self._tapes_of(self._recorded[0].update if num else None)
        recomputed = tuple(names.values())
        return replace(tapes, recomputed=recomputed, num_layers=len(layers), variant=self)


class _AllAnew(SplitBackward):
    """Split backward that reloads no payload ahead: see :class:`Recorder`."""

    def _expect_second(self, key: ChunkKey, groups: Sequence[Group]) -> None:
        """Expect no use in the second part."""


class _Recording:
    """Recording of a rank. Adjacent stages run together, because they pass on tensors."""

    def __init__(
        self, order: PipelineOrder, rank: int, manager: Manager, work: RankWork, recorder: Recorder
    ) -> None:
        self._manager, self._work, self._recorder = manager, work, recorder
        self._runs = neighbours(order.stages_of(rank))
        self._kinds = {(action.kind, action.stage_index) for action in order.actions[rank]}
        self._num = min(2, order.num_microbatches)

    def tapes(self, update: Repeated | None) -> RankTapes:
        """Record the tapes, and the ``update`` of the optimizer if that is None."""
        manager, recorder = self._manager, self._recorder
        if update is not None:  # groups are idle in layers that are recomputed
            manager.idle_groups.num_steps_left = 0
        self._run_once()
        state_bytes = 0
        if update is None:
            update = self._updates()
            state_bytes = Stretch.joined(update.first).nbytes
        self._work.begin_step()
        # From now on stages run alone, without groups of others.
        manager.idle_groups.num_steps_left = 0
        gc.collect()
        used_bytes = recorder.backend.hardware.workspace_bytes + recorder.memory.live_bytes
        manager.offloader.observers.add(recorder)
        stages: dict[int, Tape] = {}
        with collector_off():
            for run, kind in product(self._runs, ("FULL_BACKWARD", "BACKWARD_INPUT")):
                for stage, tape in self._played(run, kind).items():
                    before = stages[stage].backward if stage in stages else {}
                    stages[stage] = replace(tape, backward={**before, **tape.backward})
        manager.offloader.observers.remove(recorder)
        self._check_copies()
        return RankTapes(dict(sorted(stages.items())), used_bytes - state_bytes, update)

    def _run_once(self) -> None:
        """Run a microbatch, which allocates all memory that is allocated once."""
        self._work.begin_step()
        for run in self._runs:
            self._run(run, "FULL_BACKWARD", 1)

    def _updates(self) -> Repeated:
        """Record the first update, when all gradients exist, and the second one."""
        recorder = self._recorder
        recorder.taken()
        self._work.update()
        first = recorder.taken()
        if not first:
            return Repeated()
        self._run_once()
        recorder.taken()
        self._work.update()
        updates = map(recorder.events_of, (first, recorder.taken()))
        return Repeated(*((Stretch.joined(events),) for events in updates))

    def _played(self, run: Sequence[int], kind: str) -> dict[int, Tape]:
        """Run two microbatches with this kind of backward; return tapes of stages that have it."""
        with_these = [stage for stage in run if (kind, stage) in self._kinds]
        if not with_these:
            return {}
        self._work.begin_step()
        offloader = self._manager.offloader
        offloader.plan = Plan()  # all groups leave, and no payload is reloaded ahead
        chunks = frozenset[ChunkKey]() if offloader.split is None else offloader.split.chunks
        offloader.split = _AllAnew(chunks, is_keeping=False)
        self._recorder.forget()
        notes = self._run(run, kind, self._num)
        for stage in run:
            self._work.reduce(stage)
            notes[stage][-1].raw["REDUCE_GRAD"] = self._recorder.taken()
        return {stage: _tape(stage, notes[stage], self._recorder) for stage in with_these}

    def _run(self, run: Sequence[int], kind: str, num: int) -> dict[int, list[ChunkNotes]]:
        """Run ``num`` microbatches of adjacent stages: all forwards, then all backwards."""
        work, recorder = self._work, self._recorder
        chunks = {stage: [ChunkNotes() for _ in range(num)] for stage in run}
        for microbatch in range(num):
            for stage in run:
                recorder.chunk = chunk = chunks[stage][microbatch]
                chunk.sent_bytes = work.forward(stage, microbatch)
                chunk.raw["FORWARD"] = recorder.taken()
        for microbatch in range(num):
            for stage in reversed(run):
                recorder.chunk = chunk = chunks[stage][microbatch]
                chunk.sent_back_bytes = work.backward(kind, stage, microbatch)
                chunk.raw[kind] = recorder.taken()
                if kind == "BACKWARD_INPUT":
                    work.backward("BACKWARD_WEIGHT", stage, microbatch)
                    chunk.raw["BACKWARD_WEIGHT"] = recorder.taken()
        return chunks

    def _check_copies(self) -> None:
        link, moved = self._recorder.backend.link, self._manager.statistics()
        engine = moved.bytes_offloaded, moved.bytes_reloaded
        if (link.bytes_to_host, link.bytes_to_device) != engine:
            raise ValueError(
                f"{link.bytes_to_host} bytes went to the host and {link.bytes_to_device} came "
                f"back, of which the engine moved {engine[0]} and {engine[1]}; expected a program "
                "without copies of its own: see what it costs with run_pipeline"
            )


def neighbours(stages: Sequence[int]) -> list[list[int]]:
    """Divide ascending numbers of stages into runs of adjacent stages."""
    runs: list[list[int]] = []
    for stage in stages:
        if runs and runs[-1][-1] + 1 == stage:
            runs[-1].append(stage)
        else:
            runs.append([stage])
    return runs


def _tape(stage: int, chunks: Sequence[ChunkNotes], recorder: Recorder) -> Tape:
    """Make a tape of the last microbatch, with the first one's backward; both must be alike."""
    first, last, events_of = chunks[0], chunks[-1], recorder.events_of
    names = [[group.name for group in chunk.groups] for chunk in (first, last)]
    if names[0] != names[1] or first.payloads != last.payloads:
        raise ValueError(
            f"the groups of stage {stage} differ between its first two microbatches, expected the "
            "same names and sizes"
        )
    return Tape(
        groups=tuple(last.groups),
        payloads=last.payloads_of_groups(),
        source_bytes=tuple(last.source_bytes),
        forward=events_of(last.raw["FORWARD"]),
        backward={
            kind: Repeated(events_of(first.raw[kind]), events_of(raw))
            for kind, raw in last.raw.items()
            if "BACKWARD" in kind
        },
        reduce=events_of(last.raw["REDUCE_GRAD"]),
        sent_bytes=last.sent_bytes,
        sent_back_bytes=last.sent_back_bytes,
    )
