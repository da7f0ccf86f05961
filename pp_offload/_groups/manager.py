"""The coordinator: keeps the current chunk and step, and learns a plan from complete steps.

    manager.begin_chunk(vp_size, vp_stage)      # before each microbatch's forward
    chunk = manager.open_chunk("start", "mlp")  # for each group
    manager.reset()                             # before each step

A step runs from one :meth:`Manager.reset` to the next. A step is complete if backward came through
every chunk that has groups. The plan is made from a complete step, and made again when a later one
differs; one line in the log says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import ClassVar

import torch

from pp_offload._common.checks import brief, check_count
from pp_offload._common.processes import logger_of, warn_once
from pp_offload._core.group import ChunkKey
from pp_offload._core.statistics import OffloadStatistics
from pp_offload._groups.auto_bounds import AutoBounds
from pp_offload._groups.chunk import Chunk
from pp_offload._groups.idle_groups import IdleGroups
from pp_offload._groups.offloader import Offloader
from pp_offload._groups.plan import OTHERS_ON_A_CPU, PlanCheck, make_plan
from pp_offload._groups.profiler_names import ProfilerNames
from pp_offload._groups.room import DeviceRoom
from pp_offload._groups.split_backward import BackwardPass
from pp_offload._groups.step import StepRecord
from pp_offload._groups.step_line import Gain, log_gain
from pp_offload._hooks import is_in_region, is_recomputing, warn_of_region
from pp_offload.backends import Backend, backend_or_default
from pp_offload.config import OffloadConfig, check_config, config_or_default
from pp_offload.errors import GroupStateError, OffloadError

logger = logger_of(__name__)

MANY_CHUNKS = 1024  # microbatches without a reset after which finished ones are forgotten


class Forward(threading.local):
    """Forward of a thread. No other thread joins its groups or ends the forward."""

    chunk: Chunk | None = None
    is_evaluating = False  # whether a group ran without grad


class Manager:
    """Coordinates the chunks of one process."""

    make_chunk = staticmethod(Chunk)
    offloader_type: ClassVar[type[Offloader]] = Offloader

    def __init__(
        self, *, config: OffloadConfig | None = None, backend: Backend | None = None
    ) -> None:
        # Schedules and loops that begin chunks; with none, a group without a chunk raises.
        self.num_attached = 0
        self.idle_groups = IdleGroups()
        self.on_begin: tuple[Callable[[], None], ...] = ()  # called when a step begins
        self._profiler_names = ProfilerNames()
        config, step = config_or_default(config), StepRecord()
        self._follow(self.offloader_type(backend_or_default(backend), config, step))

    def _follow(self, offloader: Offloader) -> None:
        self.offloader, self.config = offloader, offloader.config
        self.step: StepRecord = offloader.step
        self.plan_check = PlanCheck()
        self._room = DeviceRoom(offloader)
        self.bounds = AutoBounds(offloader, offloader.config, self._room.unused_bytes)
        self.forward = Forward()  # new for all threads, or one would go on in the old step

    def take_over(self, old: Manager) -> None:
        """Continue for ``old``: marked tensors stay marked, and a disabled offload disabled."""
        self.idle_groups = old.idle_groups
        self.step.pipeline_rank = old.step.pipeline_rank
        self.offloader.engine.go_on_as(old.offloader.engine)
        self.idle_groups.was_disabled = not self.offloader.engine.is_enabled

    def configure(self, config: OffloadConfig) -> None:
        """Set the options, between steps.

        Raises:
            OffloadError: A schedule is attached with other options; nothing has changed.
            TypeError: ``config`` is no :class:`OffloadConfig`.
        """
        check_config(config)
        if config == self.config:
            return
        if self.num_attached:
            raise OffloadError(
                f"a schedule is attached with other options: {differences(self.config, config)}; "
                "give both the same config, or detach() its handle first (or, if that is lost, "
                "pp_offload.pipelining.detach(schedule))"
            )
        step = StepRecord()
        step.pipeline_rank = self.step.pipeline_rank
        offloader = Offloader(self.backend, config, step)  # first: without a disk it raises
        offloader.engine.go_on_as(self.offloader.engine)
        self.retire()
        self._follow(offloader)
        self._call_on_begin()

    def _call_on_begin(self) -> None:
        self._profiler_names.begin(self.offloader.observers)
        for call in self.on_begin:
            call()

    def retire(self) -> None:
        """Stop: forget the step, and keep only the memory that living graphs need."""
        self._drop_step()
        self.offloader.retire()

    @property
    def backend(self) -> Backend:
        return self.offloader.backend

    # Chunks

    def begin_chunk(
        self,
        vp_size: int | None,
        vp_stage: int | None,
        min_offloaded_tensor_size: int = 1024 * 1024,
        *,
        microbatch: int | None = None,
        make: Callable[..., Chunk] | None = None,
    ) -> None:
        """Begin the forward of one microbatch on one model chunk.

        Every microbatch of every step is a chunk of its own, in steps of any length.

        Args:
            vp_size: Number of virtual pipeline stages; None means 1.
            vp_stage: Virtual stage of the chunk; None means 0.
            min_offloaded_tensor_size: Smaller tensors stay on the device. In elements.
            microbatch: Number of the chunk in the step; counted per stage when None.
            make: Function that makes the chunk; :attr:`make_chunk` when None.

        Raises:
            ValueError: ``vp_stage`` is outside ``vp_size``, or a number is negative or no integer.
        """
        size, stage = _virtual_stage(vp_size, vp_stage)
        check_count("min_offloaded_tensor_size", min_offloaded_tensor_size, unit="elements")
        if microbatch is not None:
            check_count("microbatch", microbatch, unit="None counts them")
        if is_recomputing():
            return  # a checkpoint runs a model again that begins its own chunks
        self.offloader.renew_if_torn()
        self.verify()
        self._follow_options()
        if self.step.num_chunks >= MANY_CHUNKS:
            self._forget_finished()
        if torch.is_grad_enabled():
            self.step.smallest_numel = min_offloaded_tensor_size
        eligibility, is_checking = self.offloader.engine.eligibility, self.idle_groups.is_checking
        eligibility.largest_small = (eligibility.largest_small or {}) if is_checking else None
        self.step.queue.vp_size = size
        if self.forward.chunk is not None:
            self.forward.chunk.is_left = True
        offloader, make = self.offloader, make or self.make_chunk
        self.forward.chunk = make(
            min_offloaded_tensor_size, offloader=offloader, vp_stage=stage, microbatch=microbatch
        )

    def _follow_options(self) -> None:
        """Follow the plan of the options until the first complete step."""
        options = self.step.options or self.config
        if options.offload_plan is None or not self.step.is_warmup or self.offloader.plan.planned:
            return
        with self.offloader.lock:
            self.offloader.plan = make_plan((), options, self.step.pipeline_rank)
            self.bounds.follow(self.offloader.plan)

    def _forget_finished(self) -> None:
        with self.offloader.lock:
            self.step.forget_finished()
            self.offloader.engine.begin_step()
        warn_once(
            logger,
            self,
            "%d microbatches since the last reset(): those that are over are forgotten, so the "
            "step teaches no plan and no summary; call reset() at the start of each step",
            MANY_CHUNKS,
        )

    def begin_backward(self, key: ChunkKey) -> None:
        """Note that backward of a chunk begins, if it has groups. Nothing is reloaded yet: the loss
        and its inputs are on the device, where memory is highest.
        """
        with self.offloader.lock:
            self.step.begin_backward(self.step.chunks.get(key))

    @contextmanager
    def backward_pass(self, key: ChunkKey, part: BackwardPass) -> Iterator[None]:
        """Run one part of a chunk's split backward in this context."""
        chunk, split = self.step.chunks.get(key), self.offloader.split
        if chunk is None or split is None:
            yield
            return
        try:
            with self.offloader.lock:
                self.step.begin_part(chunk, part, split)
                if part is BackwardPass.WEIGHT:
                    self.offloader.resume(chunk.groups[-1])
            yield
        except BaseException:
            split.stop()
            raise
        else:
            with self.offloader.lock:
                split.end()
        finally:
            with self.offloader.lock:
                self.step.weight_pass = None

    def end_chunk(self) -> None:
        """End the forward of the current chunk; afterwards no chunk is current."""
        chunk, self.forward.chunk = self.forward.chunk, None
        if chunk is not None and chunk.key is None and chunk.microbatch is not None:
            key = ChunkKey(chunk.vp_stage, chunk.microbatch)
            self.step.queue.skip(key)  # a chunk without groups has no backward to wait for
        self.verify()

    def open_chunk(self, action: str, name: str) -> Chunk | None:
        """Return the current chunk; None if markers do nothing here. Raise a GroupStateError, which
        names the ``action``, start or commit, if no chunk is current, and markers need one here.
        """
        if torch.compiler.is_compiling():
            return None
        self.idle_groups.expects_any = False
        if not torch.is_grad_enabled():
            self.forward.is_evaluating = True
            return None
        if is_recomputing():
            warn_of_region(f"group '{name}'")  # a reentrant checkpoint shows nothing in its forward
            return None
        chunk = self.forward.chunk
        if chunk is None and not self.num_attached and not is_in_region():
            raise GroupStateError(
                f"{action} of group '{name}' without a chunk on thread {threading.get_ident()}; "
                "call init_chunk_handler(vp_size=..., vp_stage=...) before each microbatch's "
                "forward, on the thread that runs it, or attach a schedule"
            )
        return chunk

    # Steps

    def reset(self) -> None:
        """Close the last step and begin the next. Takes part in no collective.

        No plan is learned from a step without grad, or without backward of one of its chunks.

        Raises:
            GroupStateError: Groups of the last step were started, used by backward, and never
                committed; the next step has begun. Or a forward of another thread waits for its
                backward; nothing has changed.
        """
        with self.offloader.lock:
            self._check_not_busy_elsewhere()
        self.offloader.renew_if_torn()
        try:
            self.offloader.commit_delayed()
        except BaseException:
            self.abort()
            raise
        with self.offloader.lock:
            self._check_not_busy_elsewhere()  # again: no thread can begin before the lock is free
            forgotten = self.step.forgotten()
            is_complete = self.step.is_complete(is_ended=True)
            shapes = self.step.shapes() if is_complete else None
            self._room.end_step(shapes, self.bounds.hidden_bytes)
            if is_complete:
                self.learn()
            elif self.step.has_saved_nothing():
                self.step.summary = {}  # an earlier summary would show offloaded bytes
            self.bounds.end_step(self.offloader.plan, is_complete=is_complete)
            self._look_for_idle_groups()
            self._end_step()
            self.bounds.begin_step()
            self._room.begin_step((self.step.options or self.config).limit)
            if self._room.is_settled and self.bounds.take_settled():  # once for each choice
                self._log_gain()
        self.offloader.settle()
        self._call_on_begin()
        if forgotten:
            raise GroupStateError(
                f"groups {forgotten} were started and never committed, so they were not "
                "offloaded; call group_commit(output, name) at the end of each group's forward"
            )

    def _check_not_busy_elsewhere(self) -> None:
        """Raise if another thread is in the step: a step belongs to all its threads."""
        chunk = self.step.awaited_elsewhere()
        if chunk is None:
            return
        here = threading.current_thread()
        raise GroupStateError(
            f"reset() on thread {here.name} ({here.ident}), but a forward of thread "
            f"{chunk.thread.name} ({chunk.thread.ident}) in this step waits for its backward; "
            "expected one reset() for all threads of a step, when their backwards are over or "
            "their losses dropped; let steps of schedules and threads follow each other, or "
            "give a thread a manager of its own"
        )

    def abort(self) -> None:
        """Forget the running step. Tensors that autograd still holds stay valid."""
        self._drop_step()
        with self.offloader.lock:  # a loop may begin its next step without reset()
            self._room.begin_step((self.step.options or self.config).limit)

    def gain(self) -> Gain | None:
        """Return the cost and gain of the last step; None before a step was measured."""
        is_measured = self.step.summary or self.bounds.last.step_ms
        return self._room.gain(self.bounds.last, self.bounds.first) if is_measured else None

    def _log_gain(self) -> None:
        log_gain(self._room.gain(self.bounds.last, self.bounds.first))

    def _drop_step(self) -> None:
        with self.offloader.lock:
            self.bounds.end_step(self.offloader.plan, is_complete=False)
            self._room.end_step(None)
            self._end_step()
        self.offloader.settle()

    def _end_step(self) -> None:
        self.offloader.delayed.clear()
        self.offloader.engine.begin_step()
        self.forward.chunk, self.forward.is_evaluating = None, False  # other threads have their own
        self.step.clear()
        self.offloader.resume(None)
        if self.offloader.split is not None:
            self.offloader.split.clear()

    def _look_for_idle_groups(self) -> None:
        smallest, engine = self.step.smallest_numel, self.offloader.engine
        if self.idle_groups.is_checking and smallest is not None:
            # A forward that raised may have missed groups, and its exception names the cause.
            if not (self.forward.is_evaluating or self.step.has_failed()):
                self.idle_groups.check(self.step.records(), smallest, engine.eligibility)
        self.idle_groups.begin_step(is_enabled=engine.is_enabled)

    def learn(self) -> None:
        """Make the plan, and the step's summary, from a complete step."""
        old = self.offloader.plan
        self.offloader.plan = plan = self.step.make_plan(self.config, self._room.stay)
        has_same_room = (plan.stay, plan.lean) == (old.stay, old.lean)
        if not self.step.is_warmup and plan != old and has_same_room:
            logger.info(
                "the step changed from %d chunks with %d groups to %d with %d; the new plan keeps "
                "%d groups on the device",
                *(len(old.names), sum(map(len, old.names.values()))),
                *(len(plan.names), sum(map(len, plan.names.values()))),
                len(plan.staying),
            )
        smallest = self.step.smallest_numel
        self.plan_check.check(self.config, self.step.pipeline_rank, smallest_numel=smallest)
        if plan.num_unplanned and plan != old:
            warn_once(
                logger,
                self,
                "%d groups of a microbatch differ from the plan of OffloadConfig (unknown, "
                "missing, or of another size); those here will be offloaded: make a plan for this "
                "model, length and min_offloaded_tensor_size; %s",
                *(plan.num_unplanned, OTHERS_ON_A_CPU),
            )
        self.step.is_warmup = False

    def statistics(self) -> OffloadStatistics:
        """Return bytes moved and bytes in use, exact at the call."""
        return self.offloader.statistics()

    def verify(self) -> list[str]:
        """Find storages that groups committed since the last call did not free.

        Also called when the forward of a chunk ends, or the next begins.

        Returns:
            A message for each storage that is still on the device, with its holders; each is logged
            once. Empty without ``verify=True``.
        """
        return self.offloader.engine.check_freed()


def differences(there: OffloadConfig, here: OffloadConfig) -> str:
    """Return the options that differ, with both values, as text."""
    values = [(f.name, getattr(there, f.name), getattr(here, f.name)) for f in fields(there)]
    differ = [f"{name} is {brief(a)} there and {brief(b)} here" for name, a, b in values if a != b]
    return ", ".join(differ)


def _virtual_stage(vp_size: object, vp_stage: object) -> tuple[int, int]:
    """Check and return number and index of a virtual stage; None for both is a single stage."""
    size = 1 if vp_size is None else vp_size
    stage = 0 if vp_stage is None else vp_stage
    if type(size) is int and type(stage) is int and 0 <= stage < size:
        return size, stage
    raise ValueError(
        f"vp_stage is {brief(vp_stage)} and vp_size {brief(vp_size)}; expected an integer vp_size "
        "of at least 1 and an integer vp_stage from 0 to vp_size - 1; give None for both without "
        "virtual stages"
    )
