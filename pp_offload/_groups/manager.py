"""The coordinator: which chunk is current, which step it is, and what the steps so far taught.

A step runs from one :meth:`PipelineOffloadManager.reset` to the next. When one has run complete,
with the backward of every chunk that has groups, the plan is derived from it; when a later step
differs, the plan is derived anew, and one line in the log says so.

    manager.init_model_chunk_offload_handler(vp_size, vp_stage)   # before each microbatch's forward
    manager.reset()                                               # before each step
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from pp_offload._common.checks import check_count, check_kind, checked_tensors, said
from pp_offload._groups.checkpoint_regions import (
    Keeping,
    Saving,
    is_recomputing,
    may_take,
    note,
    takes_again,
)
from pp_offload._groups.chunk import ChunkOffloadHandler
from pp_offload._groups.chunk_queue import ChunkQueue
from pp_offload._groups.hook_scopes import Caller, HookScope, leave_all
from pp_offload._groups.idle_groups import IdleGroups
from pp_offload._groups.plan import ChunkKey
from pp_offload._groups.prefetch import Prefetcher
from pp_offload._groups.split_backward import BackwardPass
from pp_offload._groups.step import StepRecord
from pp_offload._groups.wiring import Wiring
from pp_offload._memory.pool import GPUTensorPool
from pp_offload._transfer.saved_tensor import Packed, Resident, is_in_backward, unpack
from pp_offload._transfer.statistics import OffloadStatistics, collect
from pp_offload._transfer.tiers import make_engine
from pp_offload.backends import Backend, Stream, backend_or_default, bare
from pp_offload.config import OffloadConfig, check_config, config_or_default
from pp_offload.errors import GroupStateError, OffloadError

logger = logging.getLogger(__name__)

MANY_CHUNKS = 1024
"""No step is expected to have so many microbatches; one that has forgets those that are over."""

Hook = Callable[[Sequence[Tensor] | None], None]

_CONTEXT = "the manager's context"
"""How a checkpoint's messages name :meth:`PipelineOffloadManager.__enter__`."""


class _Forward(threading.local):
    """The forward of a thread: no other thread joins its groups, or ends it."""

    chunk: ChunkOffloadHandler | None = None
    is_evaluating = False
    """Whether a group was passed without grad."""

    def end(self) -> None:
        """The step is over for the calling thread."""
        self.chunk = None
        self.is_evaluating = False


class _Contexts(threading.local):
    """What a thread has entered of a manager: hooks of autograd are the thread's."""

    def __init__(self) -> None:
        self.scopes: list[HookScope] = []


class PipelineOffloadManager:
    """Coordinates the chunks of one process.

    Args:
        config: Options; the defaults when not given.
        backend: Device to work on; the accelerator where there is one, else the CPU.

    Source: Megatron-LM ``PipelineOffloadManager``.
    """

    OFFLOAD_MGR: ClassVar[PipelineOffloadManager | None] = None
    INHERITED: ClassVar[PipelineOffloadManager | None] = None
    """In a forked process, that of the other one: see ``forked.py``."""

    def __init__(
        self, *, config: OffloadConfig | None = None, backend: Backend | None = None
    ) -> None:
        self.config = config_or_default(config)
        self.step = StepRecord(ChunkQueue())
        self.wiring = self._wiring(self.config, backend_or_default(backend), self.step)
        self.num_attached = 0
        self.idle_groups = IdleGroups()
        self._was_disabled = False
        self._has_warned_of_no_reset = False
        self._forward = _Forward()
        self._contexts = _Contexts()
        self._pool: GPUTensorPool | None = None

    def _wiring(self, config: OffloadConfig, backend: Backend, step: StepRecord) -> Wiring:
        return Wiring.made(
            make_engine(backend, config),
            config,
            step,
            step.queue,
            on_change=step.change,
            number_chunk=self._add_chunk,
        )

    @classmethod
    def get_instance(cls) -> PipelineOffloadManager:
        """The manager of this process, made when first asked for."""
        if cls.OFFLOAD_MGR is None:
            old = cls.INHERITED
            cls.OFFLOAD_MGR = cls() if old is None else cls(config=old.config, backend=old.backend)
            if old is not None:
                cls.OFFLOAD_MGR.take_over(old)
        return cls.OFFLOAD_MGR

    @classmethod
    def reset_instance(cls) -> None:
        """Drop the manager; the next :meth:`get_instance` makes a new one.

        Graphs that still hold tensors saved by the old one stay good. Its idle host memory is free
        for the next.
        """
        old, cls.OFFLOAD_MGR = cls.OFFLOAD_MGR, None
        if old is not None:
            old.retire()

    def take_over(self, old: PipelineOffloadManager) -> None:
        """Go on in its place: what was marked stays marked, what was disabled disabled."""
        self.idle_groups = old.idle_groups
        self.wiring.go_on_as(old.wiring)
        self._was_disabled = not self.wiring.is_enabled

    def configure(self, config: OffloadConfig) -> None:
        """Go on with these options, between steps.

        See :func:`pp_offload._groups.current.configure`.

        Raises:
            OffloadError: A schedule is attached with other options, and nothing has changed.
            TypeError: ``config`` is no :class:`OffloadConfig`.
        """
        check_config(config)
        if config == self.config:
            return
        if self.num_attached:
            raise OffloadError(
                f"a schedule is attached with {self.config}, expected the same and not {config}; "
                "detach() it first, or give both the same config"
            )
        step = StepRecord(ChunkQueue())
        wiring = self._wiring(config, self.backend, step)  # first, for a disk may not be there
        wiring.go_on_as(self.wiring)
        self.retire()
        self.config, self.step, self.wiring = config, step, wiring
        self._forward = _Forward()  # of every thread, or one goes on with a chunk of the old step

    def release_idle_memory(self) -> None:
        """Give host memory back to the system that no saved tensor needs; waits for copies."""
        self.wiring.transfer.release_idle()

    def retire(self) -> None:
        """Something else takes over: forget the step, and keep only what living graphs need."""
        self.abort()
        self.wiring.transfer.retire()

    # What it is made of

    @property
    def _prefetcher(self) -> Prefetcher:
        assert self.wiring.prefetcher is not None  # of a manager there is one
        return self.wiring.prefetcher

    @property
    def backend(self) -> Backend:
        """The device it works on."""
        return self.wiring.transfer.backend

    @property
    def d2h_stream(self) -> Stream:
        """The stream of copies to the host."""
        return cast(Stream, bare(self.backend.d2h))

    @property
    def h2d_stream(self) -> Stream:
        """The stream of copies to the device."""
        return cast(Stream, bare(self.backend.h2d))

    @property
    def cpu_tensor_pool(self) -> GPUTensorPool:
        """A pool of host tensors for callers; the engine's own bytes are in its host tier."""
        if self._pool is None:
            self._pool = GPUTensorPool("cpu", pin_memory=self.backend.device.type != "cpu")
        return self._pool

    # Chunks

    def init_model_chunk_offload_handler(
        self,
        vp_size: int | None,
        vp_stage: int | None,
        min_offloaded_tensor_size: int = 1024 * 1024,
        *,
        microbatch: int | None = None,
    ) -> None:
        """Begin the forward of one microbatch on one model chunk.

        Every microbatch of every step gets its own chunk, however many the first step had.

        Args:
            vp_size: Number of virtual pipeline stages; None means 1.
            vp_stage: Which of them; None means 0.
            min_offloaded_tensor_size: Smaller tensors stay on the device. In elements.
            microbatch: Its number in the step; counted per stage when None.

        Raises:
            ValueError: ``vp_stage`` is outside ``vp_size``, or a number is negative or none.
        """
        size, stage = _virtual_stage(vp_size, vp_stage)
        smallest = min_offloaded_tensor_size
        check_count("min_offloaded_tensor_size", smallest, unit="elements")
        if microbatch is not None:
            check_count("microbatch", microbatch, unit="None counts them")
        if is_recomputing():
            return  # a model that begins its own chunks is run again by a checkpoint around it
        leave_all()
        self.verify()
        if self.step.num_chunks >= MANY_CHUNKS:
            self._forget_finished()
        if torch.is_grad_enabled():
            self.step.smallest_numel = smallest
        self.step.vp_size = size
        self._forward.chunk = ChunkOffloadHandler(
            min_offloaded_tensor_size,
            self._pool,
            wiring=self.wiring,
            vp_stage=stage,
            microbatch=microbatch,
        )

    def _forget_finished(self) -> None:
        """Nobody calls reset(), so it seems: do not grow with every microbatch."""
        with self.wiring.lock:
            self.step.forget_finished()
            self.wiring.copies.forget_dead()
        if not self._has_warned_of_no_reset:
            self._has_warned_of_no_reset = True
            logger.warning(
                "%d microbatches since the last reset(): those that are over are forgotten, so the "
                "step teaches no plan and no summary; call reset() at the start of each step",
                MANY_CHUNKS,
            )

    def _add_chunk(self, chunk: ChunkOffloadHandler) -> ChunkKey:
        key, split = self.step.add(chunk), self.wiring.split
        if split is not None and key in split.chunks:
            self.step.expect_weight_pass(chunk, split)
        return key

    def begin_backward(self, key: ChunkKey) -> None:
        """The backward of a chunk begins. One without groups has no chunk, and is ignored.

        Reloads nothing yet: the loss and its inputs are still there, and memory is highest.
        """
        with self.wiring.lock:
            chunk = self.step.chunk(key)
            if chunk is not None:
                self.step.begin_backward(chunk)

    @contextmanager
    def backward_pass(self, key: ChunkKey, part: BackwardPass) -> Iterator[None]:
        """Around one part of the backward of a chunk, where it comes in two."""
        chunk, split = self.step.chunk(key), self.wiring.split
        if chunk is None or split is None:
            yield
            return
        try:
            with self.wiring.lock:
                split.begin(key, part)
                self._begin_pass(chunk, part)
            yield
        except BaseException:
            split.stop()
            raise
        else:
            with self.wiring.lock:
                split.end()
        finally:
            with self.wiring.lock:
                self.step.end_pass()

    def _begin_pass(self, chunk: ChunkOffloadHandler, part: BackwardPass) -> None:
        if part is BackwardPass.INPUT:
            self.step.begin_backward(chunk)
        else:
            self.step.begin_weight_pass(chunk)
            self._prefetcher.resume(chunk.groups[-1])

    def end_chunk(self) -> None:
        """The forward of the current chunk is over; there is no current chunk."""
        chunk, self._forward.chunk = self._forward.chunk, None
        if chunk is not None:
            self.step.skip(chunk)
        self.verify()

    def cur_forward_chunk(self) -> ChunkOffloadHandler | None:
        """The chunk whose forward runs on this thread."""
        return self._forward.chunk

    def cur_backward_chunk(self) -> ChunkOffloadHandler | None:
        """The chunk backward reached last."""
        return self.step.in_backward

    def pop_forward_chunk(self, name: str | None = None) -> ChunkOffloadHandler | None:
        """The chunk whose forward runs, if it takes groups (of that name) now."""
        return self._forward.chunk

    def push(self, handler: ChunkOffloadHandler) -> None:
        """Add a chunk to the backward queue."""
        check_kind("handler", handler, ChunkOffloadHandler, "a ChunkOffloadHandler")
        self.step.queue.push(handler)

    def flush(self) -> None:
        """Move staged chunks to the backward queue, last virtual stage first."""
        self.step.queue.flush()

    def pop_backward_chunk(self, name: str | None = None) -> ChunkOffloadHandler | None:
        """Take the next chunk that has groups (of that name) out of the backward queue."""
        chunk = self.step.queue.pop(name)
        return chunk if isinstance(chunk, ChunkOffloadHandler) else None

    def front_backward_chunk(self, name: str | None = None) -> ChunkOffloadHandler | None:
        """The next chunk that has groups (of that name); it stays queued."""
        chunk = self.step.queue.front(name)
        return chunk if isinstance(chunk, ChunkOffloadHandler) else None

    def open_chunk(self, action: str, name: str) -> ChunkOffloadHandler | None:
        """The current chunk, or None if markers do nothing now.

        Args:
            action: What is done with the group, for the message.
            name: Of the group.

        Raises:
            GroupStateError: There should be one.
        """
        if torch.compiler.is_compiling():
            return None
        if not torch.is_grad_enabled():
            self._forward.is_evaluating = True
            return None
        if not may_take():
            return None
        chunk = self._forward.chunk
        if chunk is None and not self.num_attached:
            raise GroupStateError(
                f"{action} of group '{name}' without a chunk on thread {threading.get_ident()}; "
                "call init_chunk_handler(vp_size, vp_stage, min_offloaded_tensor_size) before each "
                "microbatch's forward, on the thread that runs it, or attach a schedule"
            )
        return chunk

    # Steps

    def reset(self) -> None:
        """Close the last step and begin the next. Holds no collective.

        A step without grad, and one in which a chunk never went backward, teaches nothing.

        Raises:
            GroupStateError: Groups of the last step were started, used by backward, and never
                committed. The next step has begun all the same. Or a forward of another thread
                waits for its backward, and nothing has changed.
        """
        self._check_not_busy_elsewhere()
        try:
            self.flush_delayed_groups()
        except BaseException:
            self.abort()
            raise
        with self.wiring.lock:
            self._check_not_busy_elsewhere()  # again: nobody begins between this and the end
            forgotten = self.step.forgotten()
            if self.step.is_complete():
                if self.step.is_warmup:
                    self.post_warmup_callback()
                else:
                    self._learn()
            was_cut_off = leave_all()
            if not was_cut_off:  # what an interrupt left open nobody has forgotten to commit
                self._look_for_idle_groups()
            self._end_step()
        self.wiring.transfer.compact()
        if forgotten:
            raise GroupStateError(
                f"groups {forgotten} were started and never committed, so nothing of them was "
                "offloaded; call group_commit(output, name) at the end of each group's forward"
            )

    def _check_not_busy_elsewhere(self) -> None:
        """A step has one begin for all its threads: one of them must not end it for the others."""
        with self.wiring.lock:
            chunk = self.step.awaited_elsewhere()
        if chunk is not None:
            here = threading.current_thread()
            raise GroupStateError(
                f"reset() on thread {here.name} ({here.ident}), but a forward of thread "
                f"{chunk.thread.name} ({chunk.thread.ident}) in this step waits for its backward; "
                "expected one reset() for all threads of a step, when their backwards are over or "
                "their losses dropped; a thread with steps of its own needs a manager of its own"
            )

    def abort(self) -> None:
        """Forget the step that runs. Tensors autograd still holds stay good."""
        leave_all()
        self._end_step()
        self.wiring.transfer.compact()

    def _end_step(self) -> None:
        with self.wiring.lock:
            self.wiring.delayed.clear()
            self.wiring.copies.clear()
            self._forward.end()  # other threads have their own
            self.step.clear()
            self._prefetcher.reset()
            if self.wiring.split is not None:
                self.wiring.split.clear()

    def _look_for_idle_groups(self) -> None:
        step, smallest = self.step, self.step.smallest_numel
        is_silent = self._was_disabled or self._forward.is_evaluating
        is_silent = is_silent or not self.idle_groups.num_steps_left
        if smallest is not None and not is_silent:
            self.idle_groups.check(step.group_uses(), smallest)
        self._was_disabled = not self.wiring.is_enabled

    def post_warmup_callback(self) -> None:
        """Derive the plan, and :attr:`offload_summary_bytes`, from the first complete step."""
        self._learn()
        self.step.is_warmup = False

    def _learn(self) -> None:
        old = self.wiring.plan
        self.wiring.plan = plan = self.step.make_plan(self.config)
        if not self.step.is_warmup and plan != old:
            logger.info(
                "the step changed: it had %d chunks, the plan was for %d; the plan is derived anew "
                "and keeps %d groups on the device",
                len(plan.names),
                len(old.names),
                len(plan.kept),
            )

    @property
    def offload_summary_bytes(self) -> dict[str, int]:
        """Bytes copied to the host per group name, by the chunks live at the peak.

        Of the last complete step; empty before there was one.
        """
        return dict(self.step.summary)

    @property
    def offload_summary_total_bytes(self) -> int:
        """The sum of :attr:`offload_summary_bytes`."""
        return sum(self.step.summary.values())

    def statistics(self) -> OffloadStatistics:
        """What was moved and what is in use, exact at the call."""
        return collect(self.wiring.transfer)

    def verify(self) -> list[str]:
        """With ``verify=True``: what the groups committed since the last call did not free.

        Also asked when the forward of a chunk ends, or the next begins.

        Returns:
            A message for each storage that is still on the device, with who holds it; each is
            logged once. Empty without ``verify``.
        """
        verifier = self.wiring.verifier
        return [] if verifier is None else verifier.check_freed()

    # Switches

    def disable_offload(self) -> None:
        """From now on nothing is offloaded, until :meth:`enable_offload`."""
        self.wiring.is_enabled = False
        self._was_disabled = True

    def enable_offload(self) -> None:
        """Offload again."""
        self.wiring.is_enabled = True

    def mark_not_offloadable(self, tensor: Tensor) -> None:
        """Keep ``tensor`` and every view of it on the device, as long as its storage lives.

        Raises:
            TypeError: It is no tensor.
        """
        check_kind("tensor", tensor, Tensor, "a tensor", "mark each tensor on its own")
        self.wiring.eligibility.kept.add(tensor)

    # Delayed groups

    def push_offload_groups(
        self, group_hook: Hook, forced_released_tensors: Sequence[Tensor] | None
    ) -> None:
        """Queue a commit for :meth:`flush_delayed_groups`.

        Raises:
            TypeError: ``group_hook`` cannot be called, or the tensors are none.
        """
        if not callable(group_hook):
            raise TypeError(f"group_hook is {said(group_hook)}, expected a function of the tensors")
        released = checked_tensors("forced_released_tensors", forced_released_tensors)
        self.wiring.delayed.append(lambda: group_hook(released))

    def flush_delayed_groups(self) -> None:
        """Do the queued commits, in forward order."""
        delayed = self.wiring.delayed
        while delayed:
            delayed.pop(0)()

    # Hooks

    def __enter__(self) -> PipelineOffloadManager:
        """Save tensors through the engine until :meth:`__exit__`; may be nested."""
        scopes = self._contexts.scopes
        while scopes and scopes[-1].is_over:
            scopes.pop().leave()
        scopes.append(HookScope(Caller.of(1)))  # first: nothing entered is to be forgotten
        try:
            pack = self._pack()
            if pack is not None:
                scopes[-1].enter(pack)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _pack(self) -> Saving | Keeping | None:
        """What to save through: where a forward runs again, what it was in the forward."""
        takes = takes_again(_CONTEXT, wants=True)
        if takes is not None:
            return Keeping(Resident) if takes else None
        if not may_take():
            return None
        note(_CONTEXT, took=True)
        return Saving(self.on_save_for_backward)

    def __exit__(self, *args: Any) -> None:
        """Leave the innermost scope; an exception passes on.

        Raises:
            GroupStateError: This thread has entered none.
        """
        scopes = self._contexts.scopes
        if not scopes:
            raise GroupStateError(
                f"a manager is left that thread {threading.get_ident()} did not enter; expected "
                "as many exits as entries, on the same thread; use it in a with statement"
            )
        scopes[-1].leave()
        scopes.pop()

    def on_save_for_backward(self, tensor: Tensor) -> Packed:
        """The pack hook: the tag it returns is bound to the group open now."""
        chunk = self._forward.chunk
        if chunk is None or is_in_backward():  # a forward that runs again is of another chunk
            return Resident(tensor)
        return chunk.tensor_push(tensor)

    def on_get_saved_tensor(self, saved_state: Packed) -> Tensor:
        """The unpack hook. May be called any number of times, in any order."""
        return unpack(saved_state)


def _virtual_stage(vp_size: object, vp_stage: object) -> tuple[int, int]:
    """Number of virtual stages, and which of them; None for both is one."""
    size = 1 if vp_size is None else vp_size
    stage = 0 if vp_stage is None else vp_stage
    if type(size) is int and type(stage) is int and 0 <= stage < size:
        return size, stage
    raise ValueError(
        f"vp_stage is {said(vp_stage)} and vp_size {said(vp_size)}; expected an integer vp_size of "
        "at least 1 and an integer vp_stage from 0 to vp_size - 1; give None for both without "
        "virtual stages"
    )
