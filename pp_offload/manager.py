"""The coordinator: which chunk is current, which step it is, and what the steps so far taught.

A step runs from one :meth:`PipelineOffloadManager.reset` to the next. When one has run complete,
with the backward of every chunk that has groups, the plan is derived from it; when a later step
differs, the plan is derived anew, and one line in the log says so.

    manager.init_model_chunk_offload_handler(vp_size, vp_stage)   # before each microbatch's forward
    manager.reset()                                               # before each step
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pp_offload.activity import ActivityWatch
from pp_offload.backends import Backend, Stream, bare, default_backend
from pp_offload.chain import make_engine
from pp_offload.chunk import ChunkOffloadHandler
from pp_offload.chunk_queue import ChunkQueue
from pp_offload.config import OffloadConfig
from pp_offload.errors import GroupStateError
from pp_offload.policy import ChunkKey
from pp_offload.prefetch import Prefetcher
from pp_offload.saved import Packed, Resident, is_in_backward, unpack
from pp_offload.services import Services
from pp_offload.split import Part
from pp_offload.statistics import OffloadStatistics, collect
from pp_offload.step import StepRecord
from pp_offload.tensors import Eligibility, StorageSet
from pp_offload.tiers.pool import GPUTensorPool
from pp_offload.verify import Verifier

logger = logging.getLogger(__name__)

Hook = Callable[[Sequence[Tensor] | None], None]


class PipelineOffloadManager:
    """Coordinates the chunks of one process.

    Args:
        config: Options; the defaults when not given.
        backend: Device to work on; the accelerator where there is one, else the CPU.

    Source: Megatron-LM ``PipelineOffloadManager``.
    """

    OFFLOAD_MGR: ClassVar[PipelineOffloadManager | None] = None

    def __init__(
        self, *, config: OffloadConfig | None = None, backend: Backend | None = None
    ) -> None:
        self.config = config or OffloadConfig()
        backend = backend or default_backend()
        transfer = make_engine(backend, self.config)
        self.step = StepRecord(ChunkQueue())
        self._prefetcher = Prefetcher(transfer, self.step, self.config.prefetch_bytes)
        self.services = Services(
            transfer,
            Eligibility(backend.device, StorageSet()),
            self._prefetcher,
            self.step.queue,
            verifier=Verifier(transfer) if self.config.verify else None,
            on_change=self.step.change,
            number_chunk=self._add_chunk,
        )
        self.num_attached = 0
        self.activity = ActivityWatch()
        self._was_disabled = False
        self._current: ChunkOffloadHandler | None = None
        self._scopes: list[saved_tensors_hooks] = []
        self._pool: GPUTensorPool | None = None

    @classmethod
    def get_instance(cls) -> PipelineOffloadManager:
        """The manager of this process, made when first asked for."""
        if cls.OFFLOAD_MGR is None:
            cls.OFFLOAD_MGR = cls()
        return cls.OFFLOAD_MGR

    @classmethod
    def reset_instance(cls) -> None:
        """Drop the manager; the next :meth:`get_instance` makes a new one.

        Graphs that still hold tensors saved by the old one stay good. Its idle host memory is free
        for the next.
        """
        if cls.OFFLOAD_MGR is not None:
            cls.OFFLOAD_MGR.retire()
        cls.OFFLOAD_MGR = None

    def release_idle_memory(self) -> None:
        """Give host memory back to the system that no saved tensor needs; waits for copies."""
        self.services.transfer.release_idle()

    def retire(self) -> None:
        """Another manager takes over: forget the step, and keep only what living graphs need."""
        self.abort()
        self.services.transfer.retire()

    # What it is made of

    @property
    def backend(self) -> Backend:
        """The device it works on."""
        return self.services.transfer.backend

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
            ValueError: ``vp_stage`` is outside ``vp_size``, or a number is negative.
        """
        size = 1 if vp_size is None else vp_size
        stage = 0 if vp_stage is None else vp_stage
        if size < 1 or not 0 <= stage < size:
            raise ValueError(
                f"vp_stage is {vp_stage} and vp_size {vp_size}; expected vp_size of at least 1 and "
                "vp_stage from 0 to vp_size - 1; give None for both without virtual stages"
            )
        smallest = min_offloaded_tensor_size
        if isinstance(smallest, bool) or not isinstance(smallest, int) or smallest < 0:
            raise ValueError(
                f"min_offloaded_tensor_size is {smallest!r}; expected at least 0 elements"
            )
        self.verify()
        if torch.is_grad_enabled():
            self.step.smallest_numel = smallest
        self.step.vp_size = size
        self._current = ChunkOffloadHandler(
            min_offloaded_tensor_size,
            self._pool,
            services=self.services,
            vp_stage=stage,
            microbatch=microbatch,
        )

    def _add_chunk(self, chunk: ChunkOffloadHandler) -> ChunkKey:
        key, split = self.step.add(chunk), self.services.split
        if split is not None and key in split.chunks:
            self.step.expect_weight_pass(chunk, split)
        return key

    def begin_backward(self, key: ChunkKey) -> None:
        """The backward of a chunk begins. One without groups has no chunk, and is ignored.

        Reloads nothing yet: the loss and its inputs are still there, and memory is highest.
        """
        chunk = self.step.chunk(key)
        if chunk is not None:
            self.step.begin_backward(chunk)

    @contextmanager
    def backward_part(self, key: ChunkKey, part: Part) -> Iterator[None]:
        """Around one part of the backward of a chunk, where it comes in two."""
        chunk, split = self.step.chunk(key), self.services.split
        if chunk is None or split is None:
            yield
            return
        split.begin(key, part)
        if part is Part.INPUT:
            self.begin_backward(key)
        else:
            self.step.begin_weight_pass(chunk)
            self._prefetcher.resume(chunk.groups[-1])
        yield
        split.end()
        self.step.end_part()

    def end_chunk(self) -> None:
        """The forward of the current chunk is over; there is no current chunk."""
        if self._current is not None:
            self.step.skip(self._current)
        self._current = None
        self.verify()

    def cur_forward_chunk(self) -> ChunkOffloadHandler | None:
        """The chunk whose forward runs."""
        return self._current

    def cur_backward_chunk(self) -> ChunkOffloadHandler | None:
        """The chunk backward reached last."""
        return self.step.in_backward

    def pop_forward_chunk(self, name: str | None = None) -> ChunkOffloadHandler | None:
        """The chunk whose forward runs, if it takes groups (of that name) now."""
        return self._current

    def push(self, handler: ChunkOffloadHandler) -> None:
        """Add a chunk to the backward queue."""
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
        if not torch.is_grad_enabled():
            self.step.is_evaluating = True
            return None
        if torch.compiler.is_compiling() or is_in_backward():
            return None
        if self._current is None and not self.num_attached:
            raise GroupStateError(
                f"{action} of group '{name}' without a chunk; call init_chunk_handler(vp_size, "
                "vp_stage, min_offloaded_tensor_size) before each microbatch's forward, or attach "
                "a schedule"
            )
        return self._current

    # Steps

    def reset(self) -> None:
        """Close the last step and begin the next. Holds no collective.

        A step without grad, and one in which a chunk never went backward, teaches nothing.

        Raises:
            GroupStateError: Groups of the last step were started, used by backward, and never
                committed. The next step has begun all the same.
        """
        try:
            self.flush_delayed_groups()
        except BaseException:
            self.abort()
            raise
        forgotten = self.step.forgotten()
        if self.step.is_complete():
            if self.step.is_warmup:
                self.post_warmup_callback()
            else:
                self._learn()
        self._look_for_idle_groups()
        self.abort()
        if forgotten:
            raise GroupStateError(
                f"groups {forgotten} were started and never committed, so nothing of them was "
                "offloaded; call group_commit(output, name) at the end of each group's forward"
            )

    def abort(self) -> None:
        """Forget the step that runs. Tensors autograd still holds stay good."""
        self.services.delayed.clear()
        self.services.copies.clear()
        self._current = None
        self.step.clear()
        self._prefetcher.reset()
        if self.services.split is not None:
            self.services.split.clear()
        self.services.transfer.fit()

    def _look_for_idle_groups(self) -> None:
        step, smallest = self.step, self.step.smallest_numel
        is_silent = self._was_disabled or step.is_evaluating or not self.activity.num_steps_left
        if smallest is not None and not is_silent:
            self.activity.check(step.activity(), smallest)
        self._was_disabled = not self.services.is_enabled

    def post_warmup_callback(self) -> None:
        """Derive the plan, and :attr:`offload_summary_bytes`, from the first complete step."""
        self._learn()
        self.step.is_warmup = False

    def _learn(self) -> None:
        old = self.services.plan
        self.services.plan = plan = self.step.make_plan(self.config)
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
        return collect(self.services.transfer)

    def verify(self) -> list[str]:
        """With ``verify=True``: what the groups committed since the last call did not free.

        Also asked when the forward of a chunk ends, or the next begins.

        Returns:
            A message for each storage that is still on the device, with who holds it; each is
            logged once. Empty without ``verify``.
        """
        verifier = self.services.verifier
        return [] if verifier is None else verifier.check_freed()

    # Switches

    def disable_offload(self) -> None:
        """From now on nothing is offloaded, until :meth:`enable_offload`."""
        self.services.is_enabled = False
        self._was_disabled = True

    def enable_offload(self) -> None:
        """Offload again."""
        self.services.is_enabled = True

    def mark_not_offloadable(self, tensor: Tensor) -> None:
        """Keep ``tensor`` and every view of it on the device, as long as its storage lives."""
        self.services.eligibility.kept.add(tensor)

    # Delayed groups

    def push_offload_groups(
        self, group_hook: Hook, forced_released_tensors: Sequence[Tensor] | None
    ) -> None:
        """Queue a commit for :meth:`flush_delayed_groups`."""
        self.services.delayed.append(lambda: group_hook(forced_released_tensors))

    def flush_delayed_groups(self) -> None:
        """Do the queued commits, in forward order."""
        delayed = self.services.delayed
        while delayed:
            delayed.pop(0)()

    # Hooks

    def __enter__(self) -> PipelineOffloadManager:
        """Save tensors through the engine until :meth:`__exit__`; may be nested."""
        scope = saved_tensors_hooks(self.on_save_for_backward, self.on_get_saved_tensor)
        scope.__enter__()
        self._scopes.append(scope)
        return self

    def __exit__(self, *args: Any) -> None:
        """Leave the innermost scope; an exception passes on."""
        self._scopes.pop().__exit__(*args)

    def on_save_for_backward(self, tensor: Tensor) -> Packed:
        """The pack hook: the tag it returns is bound to the group open now."""
        chunk = self._current
        return Resident(tensor) if chunk is None else chunk.tensor_push(tensor)

    def on_get_saved_tensor(self, saved_state: Packed) -> Tensor:
        """The unpack hook. May be called any number of times, in any order."""
        return unpack(saved_state)
