"""Offload in a schedule of ``torch.distributed.pipelining``, without a change of the loop.

    handle = attach(schedule, groups={"mlp": "layers.*.mlp"}, config=OffloadConfig(...))

Every forward of a stage becomes a chunk. The order of backward is read from the schedule's list of
actions, so prefetch is right from the first step; without such a list the first step teaches it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

from pp_offload._common.checks import brief
from pp_offload._common.offload_plan import RankPlan
from pp_offload._common.undo import UndoStack
from pp_offload._core.group import ChunkKey, WeightPassKey
from pp_offload._groups.manager import Manager, differences
from pp_offload._groups.split_backward import BackwardPass, SplitBackward
from pp_offload._megatron.manager import PipelineOffloadManager
from pp_offload.checkpointing import is_recomputed
from pp_offload.config import OffloadConfig, check_config
from pp_offload.errors import OffloadError
from pp_offload.modules import (
    OffloadModulesHandle,
    Patterns,
    check_patterns,
    listed,
    mark_modules,
    no_match,
)

_ATTACHED = "_pp_offload_handle"


def attach(
    schedule: Any, groups: Patterns | None = None, config: OffloadConfig | None = None
) -> AttachedSchedule:
    """Offload the activations of a schedule's stages.

    Args:
        schedule: Any schedule of ``torch.distributed.pipelining``.
        groups: Module name patterns by group name, for each stage's module; None if the model
            marks its groups itself. In ``layers.*.mlp``, ``*`` stands for one part of a name. A
            pattern must match on one of this rank's stages.
        config: Options; those of the current manager when None; see :func:`pp_offload.configure`.

    Returns:
        A handle, also a context manager; ``detach()`` restores schedule and modules.

    Raises:
        OffloadError: The schedule is attached already, another schedule is attached with other
            options, or the plan of ``config`` has too few ranks, or recomputes layers that are not
            recomputed.
        ValueError: A pattern matches nothing on this rank.
        TypeError: ``schedule`` is no schedule, ``groups`` no mapping of names to patterns, or
            ``config`` no :class:`OffloadConfig`.
    """
    _stages(schedule)
    if groups is not None:
        check_patterns(groups)
    if config is not None:
        check_config(config)
    attached: AttachedSchedule | None = getattr(schedule, _ATTACHED, None)
    if attached is not None:
        differ = differences(attached.manager.config, config) if config is not None else ""
        raise OffloadError(
            f"{type(schedule).__name__} is attached already; detach() its handle first, or keep "
            "using that handle; if it is lost, call pp_offload.pipelining.detach(schedule)"
            + (f"; the options differ: {differ}" if differ else "")
        )
    return AttachedSchedule(schedule, groups, config)


def detach(schedule: Any) -> None:
    """Detach a schedule whose handle is lost; does nothing if it is not attached."""
    if hasattr(schedule, _ATTACHED):
        getattr(schedule, _ATTACHED).detach()


class AttachedSchedule(AbstractContextManager["AttachedSchedule"]):
    """A schedule whose stages offload; made by :func:`attach`."""

    def __init__(
        self, schedule: Any, groups: Patterns | None, config: OffloadConfig | None
    ) -> None:
        self.manager = PipelineOffloadManager.get_instance()
        self._schedule, self._stages = schedule, _stages(schedule)
        self._rank = int(self._stages[0].group_rank)
        self._modules: OffloadModulesHandle | None = None
        for stage in self._stages:
            if _ATTACHED in vars(stage):
                raise OffloadError(
                    f"stage {stage.stage_index} is attached through another schedule; detach() "
                    "the handle of that schedule first"
                )
        self._is_attached = False
        self._undo = UndoStack()
        try:
            self._attach(groups, config)
        except BaseException:
            self.detach()
            raise

    def _attach(self, groups: Patterns | None, config: OffloadConfig | None) -> None:
        manager, undo = self.manager, self._undo
        undo.set(self._schedule, _ATTACHED, self)
        options = config or manager.config
        numbers = [stage.stage_index for stage in self._stages]
        late = [each.stage_index for each in self._stages if each.is_first and not each.dw_builder]
        actions = actions_of(self._schedule, self._rank)
        self._order = backward_order(actions, numbers, late, options)
        plan = options.offload_plan
        if plan is not None:
            plan.rank(self._stages[0].group_size - 1)  # on each rank: all know what the last lacks
            _check_recomputed(self._stages, plan.rank(self._rank))
        self._mark_modules(groups)
        if config is not None:
            manager.configure(config)  # last, because the old options are lost
        manager.plan_check.check(manager.config, self._rank, **self._facts())
        undo.callback(self._leave_manager)
        manager.num_attached, self._is_attached = manager.num_attached + 1, True
        if groups is None and plan is None:
            manager.idle_groups.expect(())  # counts steps anew
            manager.idle_groups.expects_any = True
        for vp_stage, stage in enumerate(self._stages):
            undo.set(stage, _ATTACHED, self)
            undo.wrap(stage, "forward_one_chunk", partial(self._forward, vp_stage))
            backward = partial(self._backward, vp_stage, BackwardPass.INPUT)
            undo.wrap(stage, "backward_one_chunk", backward)
            backward = partial(self._backward, vp_stage, BackwardPass.WEIGHT)
            undo.wrap(stage, "backward_weight_one_chunk", backward)
        undo.wrap(self._schedule, "step", self._step)

    def _facts(self) -> dict[str, Any]:
        """Return the known facts of the schedule that a plan's options also record."""
        kind, num_ranks = type(self._schedule), self._stages[0].group_size
        facts = {"num_microbatches": self._schedule._n_microbatches, "num_ranks": num_ranks}
        is_named = not kind.__name__.startswith("_")  # unlike a list of actions
        if is_named and kind.__module__ == "torch.distributed.pipelining.schedules":
            facts["schedule"] = kind.__name__
        return facts

    def detach(self) -> None:
        """Restore the schedule and the modules. A second call does nothing."""
        self._undo.close()

    def _leave_manager(self) -> None:
        manager = self.manager
        if self._is_attached:
            manager.num_attached, self._is_attached = manager.num_attached - 1, False
        manager.step.queue.set_order(())
        manager.offloader.follow_parts(None)
        manager.idle_groups.expects_any = False
        manager.release_idle_memory()

    def _remove_groups(self) -> None:
        if self._modules is not None:
            self._modules.remove()

    def __repr__(self) -> str:
        state = f"{len(self._stages)} stages" if self._is_attached else "detached"
        groups = "groups marked by the model"
        if self._modules is not None and self._modules.modules:
            groups = self._modules.described()
        name = type(self._schedule).__name__
        return f"<AttachedSchedule of {name}: {state}; {groups}>"

    def __exit__(self, *error: object) -> None:
        self.detach()

    def _mark_modules(self, groups: Patterns | None) -> None:
        self._keep_modules()
        models = {f" of stage {stage.stage_index}": stage.submod for stage in self._stages}
        self._undo.callback(self._remove_groups)
        self._modules = mark_modules(models, groups or {})
        for group, patterns in (groups or {}).items():
            if not self._modules.modules[group]:
                numbers = ", ".join([str(stage.stage_index) for stage in self._stages])
                near = no_match(self._stages[0].submod, listed(patterns))
                raise ValueError(
                    f"pipeline rank {self._rank} has no module of group '{group}' in "
                    f"stage {numbers}: {near}; leave the group out on such a rank, or add a "
                    "pattern of a module that it has"
                )

    def _keep_modules(self) -> None:
        # In each step, because memory of parameters and modules of stages may change.
        residents = self.manager.offloader.engine.eligibility.residents
        for stage in self._stages:
            for tensor in (*stage.submod.parameters(), *stage.submod.buffers()):
                if tensor not in residents:
                    residents.add(tensor)

    def _forward(
        self, vp_stage: int, inner: Callable[..., Any], fwd_chunk_id: int, *args: Any, **kwargs: Any
    ) -> Any:
        if not self._stages[vp_stage].has_backward:
            return inner(fwd_chunk_id, *args, **kwargs)
        manager, num_stages = self.manager, len(self._stages)
        smallest = manager.config.min_offloaded_tensor_size
        try:
            manager.begin_chunk(num_stages, vp_stage, smallest, microbatch=fwd_chunk_id)
            return inner(fwd_chunk_id, *args, **kwargs)
        finally:
            manager.end_chunk()

    def _backward(
        self,
        vp_stage: int,
        part: BackwardPass,
        inner: Callable[..., Any],
        bwd_chunk_id: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        with self._order.running(self.manager, ChunkKey(vp_stage, bwd_chunk_id), part):
            return inner(bwd_chunk_id, *args, **kwargs)

    def _step(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.begin_step()  # outside of try: if this raises, another thread's step goes on
        try:
            return inner(*args, **kwargs)
        except BaseException:
            self.manager.abort()
            raise

    def begin_step(self) -> None:
        """Begin a step. ``schedule.step`` calls this; callers of single actions must call it."""
        self._keep_modules()
        self._order.begin_step(self.manager, self._rank)


def _check_recomputed(stages: list[Any], plan: RankPlan) -> None:
    """Raise if the plan recomputes a layer that is not recomputed."""
    for stage, names in zip(stages, plan.recomputed, strict=False):  # by hand there may be none
        missing = [name for name in names if not is_recomputed(stage.submod, name)]
        if missing:
            raise OffloadError(
                f"the plan has {missing} of stage {stage.stage_index} recomputed, and they are not;"
                f" call recompute_layers(module, {list(names)}) with the stage's module before"
            )


def _stages(schedule: Any) -> list[Any]:
    if hasattr(schedule, "_stages"):
        return list(schedule._stages)
    if hasattr(schedule, "_stage"):
        return [schedule._stage]
    raise TypeError(
        f"schedule is {brief(schedule)}, which has no stages; expected a schedule of "
        "torch.distributed.pipelining"
    )


class BackwardOrder(NamedTuple):
    """Order of backward on this rank; empty if the schedule has no list of actions."""

    keys: list[ChunkKey | WeightPassKey]  # backwards in order
    split: SplitBackward | None  # observer of those that come in two parts; None if none does
    late: frozenset[ChunkKey]  # first part does nothing: a first stage differentiates no inputs

    def begin_step(self, manager: Manager, rank: int) -> None:
        """Begin a step of a rank, whose groups are needed in this order."""
        manager.reset()
        manager.offloader.follow_parts(self.split)
        manager.step.pipeline_rank = rank
        if self.keys or manager.step.queue.is_scheduled:
            manager.step.queue.set_order(self.keys, is_scheduled=bool(self.keys))

    def running(
        self, manager: Manager, key: ChunkKey, part: BackwardPass
    ) -> AbstractContextManager[None]:
        """Begin a chunk's backward, or a part of it, which runs in the returned context."""
        if self.split is not None and key in self.split.chunks:
            return manager.backward_pass(key, part)
        if part is BackwardPass.WEIGHT or key not in self.late:
            manager.begin_backward(key)
        return nullcontext()


def backward_order(
    actions: Iterable[Action], stages: Sequence[int], late: Collection[int], config: OffloadConfig
) -> BackwardOrder:
    """Read the order of backward on a rank, whose ``stages`` are by virtual stage."""
    keys: list[ChunkKey | WeightPassKey] = []
    late_keys = []
    for kind, stage, microbatch in actions:
        if stage not in stages:
            continue
        key, is_late = ChunkKey(stages.index(stage), microbatch), stage in late
        if kind == "BACKWARD_INPUT" and is_late:
            late_keys.append(key)
        elif kind == "BACKWARD_WEIGHT" and not is_late:
            keys.append(WeightPassKey(key))
        elif kind in ("FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT"):
            keys.append(key)
    chunks = frozenset(key.chunk for key in keys if isinstance(key, WeightPassKey))
    split = SplitBackward(chunks, is_keeping=config.split_backward == "keep") if chunks else None
    return BackwardOrder(keys, split, frozenset(late_keys))


class Action(NamedTuple):
    """An action of a schedule."""

    kind: str  # name of one of PyTorch's computation types, such as ``FULL_BACKWARD``
    stage_index: int
    microbatch: int


def actions_of(schedule: Any, rank: int) -> Iterator[Action]:
    """Yield a rank's actions in order, overlapping ones one by one; none if there is no list."""
    with_comms = getattr(schedule, "pipeline_order_with_comms", None)
    order = with_comms or getattr(schedule, "pipeline_order", None) or {}
    for action in order.get(rank, ()):
        if action is not None:
            for part in getattr(action, "sub_actions", None) or [action]:
                yield Action(part.computation_type.name, part.stage_index, part.microbatch_index)
