"""Interface and functions that a layer's forward calls, as Megatron introduced them.

    off_interface.init_chunk_handler(vp_size, vp_stage, min_offloaded_tensor_size)

    with off_interface(offload, x, "mlp_norm") as x:   # group starts; tensors saved join it
        y = self.norm(x)
    y = off_interface.group_commit(y, name="mlp_norm")  # copies are queued

A saved tensor refers to its group, so backward asks for no manager.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pp_offload._core.group import Group
from pp_offload._groups.chunk import Chunk
from pp_offload._hooks import HookScope, PackHook, exact_exit, is_recomputing
from pp_offload._megatron.manager import PipelineOffloadManager
from pp_offload.errors import GroupStateError


def fine_grained_offloading_disable_offload() -> None:
    """See :meth:`PipelineOffloadManager.disable_offload`."""
    PipelineOffloadManager.get_instance().disable_offload()


def fine_grained_offloading_enable_offload() -> None:
    """See :meth:`PipelineOffloadManager.enable_offload`."""
    PipelineOffloadManager.get_instance().enable_offload()


def fine_grained_offloading_group_start(tensor: Tensor, name: str | None = None) -> Tensor:
    """Open a group on the current chunk.

    Args:
        tensor: The group's input, with or without grad.
        name: Name of the group; ``group`` if not given.

    Returns:
        ``tensor`` itself.

    Raises:
        GroupStateError: No chunk is current.
    """
    _start("group" if name is None or name == "" else name)
    return tensor


def _start(name: str) -> Group | None:
    """Open a group; None where groups do nothing: no grad, offload disabled, or a checkpoint."""
    chunk = PipelineOffloadManager.get_instance().open_chunk("start", name)
    return None if chunk is None or chunk.leaves_out(name) else chunk.start(name)


def fine_grained_offloading_group_commit(
    tensor: Any,
    name: str,
    forced_released_tensors: Sequence[Tensor] | None = None,
    delay_offload: bool = False,
) -> Any:
    """Close a group and queue the copies of its tensors to the host.

    Args:
        tensor: The group's output, or a tuple, list or dict of outputs.
        name: Name that the group was started with.
        forced_released_tensors: Tensors to empty after the copy although the program still refers
            to them. Unlike in Megatron, a tensor with a shared storage is not emptied.
        delay_offload: Only queue the commit, until
            :func:`fine_grained_offloading_group_flush_delayed_groups`.

    Returns:
        ``tensor`` itself.

    Raises:
        GroupStateError: No chunk is current, or no open group has this name.
    """
    chunk = PipelineOffloadManager.get_instance().open_chunk("commit", name)
    if chunk is not None:
        chunk.commit(name, forced_released_tensors, delay=delay_offload)
    return tensor


def fine_grained_offloading_group_flush_delayed_groups() -> None:
    """Run the delayed commits, in forward order. Does nothing in a recomputation."""
    if not is_recomputing():
        PipelineOffloadManager.get_instance().flush_delayed_groups()


# CUDA graphs


def fine_grained_offloading_forward_record(event: Any) -> None:
    """Record ``event``, a ``torch.cuda.Event``, on the current stream, which then waits for all
    copies queued so far.

    A captured graph must join every stream that it forked, so a captured forward and a captured
    backward each end with a record. The graph keeps the host memory of its copies until the manager
    is dropped. Run a step first: a capture cannot allocate host memory.
    """
    offloader = PipelineOffloadManager.get_instance().offloader
    if event is not None:  # main has none without CUDA
        event.record(offloader.backend.current_stream())
    offloader.engine.mover.join()


class FineGrainedOffloadingBackwardRecordFunction(torch.autograd.Function):
    """Identity whose backward records an event and joins the copies.

    Source: Megatron-LM ``FineGrainedOffloadingBackwardRecordFunction``.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, event: Any) -> Tensor:
        ctx.event = event
        return tensor

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        """Record ``event`` on the current stream, which then waits for both copy streams."""
        fine_grained_offloading_forward_record(ctx.event)
        return grad_output, None


def fine_grained_offloading_backward_record(tensor: Tensor, event: Any) -> Tensor:
    """Return ``tensor``; its backward records ``event`` and joins the copy streams."""
    return FineGrainedOffloadingBackwardRecordFunction.apply(tensor, event)


# A group around code


class FineGrainedActivationOffloadingInterface:
    """A group as a context: opened on entering, its saved tensors collected until leaving.

    The group is committed by :meth:`group_commit`, after or inside the context.

    Args:
        offload: If False, the context only returns ``tensor``.
        tensor: The group's input.
        name: Name of the group.

    Source: Megatron-LM ``FineGrainedActivationOffloadingInterface``.
    """

    def __init__(self, offload: bool, tensor: Tensor, name: str) -> None:
        self.offload, self.tensor, self.name = offload, tensor, name
        self._hooks: HookScope | None = None  # a compiler traces __exit__
        self._group: Group | None = None

    def __enter__(self) -> Tensor:
        """Open the group, and return its input. Inside a checkpoint no group is opened."""
        if not self.offload or torch.compiler.is_compiling():
            return self.tensor
        if self._group is not None:
            raise GroupStateError(
                f"group '{self.name}' is entered again before it was left; expected one object of "
                f"{type(self).__name__} for each with"
            )
        try:
            self._group = _start(self.name)
            if self._group is not None:
                self._hooks = HookScope()
                self._hooks.enter(PackHook(self._group.pack), self)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self.tensor

    @exact_exit
    def __exit__(self, *args: Any) -> None:
        """Stop collecting. An exception propagates."""
        if self._hooks is not None:
            self._hooks.leave(*args[1:2])
        group, self._group = self._group, None
        if group is not None:
            group.has_failed = bool(args) and args[0] is not None

    @staticmethod
    def init_chunk_handler(
        vp_size: int | None, vp_stage: int | None, min_offloaded_tensor_size: int
    ) -> None:
        """Begin the forward of one microbatch; see :meth:`PipelineOffloadManager.begin_chunk`."""
        manager = PipelineOffloadManager.get_instance()
        manager.begin_chunk(vp_size, vp_stage, min_offloaded_tensor_size)

    @staticmethod
    def get_context(flag: bool) -> AbstractContextManager[object]:
        """Return the manager, whose context saves tensors; or a context without effect."""
        return PipelineOffloadManager.get_instance() if flag else nullcontext()

    group_commit = staticmethod(fine_grained_offloading_group_commit)

    @staticmethod
    def mark_not_offloadable(tensor: Tensor) -> None:
        """Keep ``tensor`` and its views on the device."""
        PipelineOffloadManager.get_instance().mark_not_offloadable(tensor)

    forward_record = staticmethod(fine_grained_offloading_forward_record)

    @staticmethod
    def reset() -> None:
        """Begin a step: close the last one. Takes part in no collective."""
        PipelineOffloadManager.get_instance().reset()

    reset_instance = staticmethod(PipelineOffloadManager.reset_instance)


class FineGrainedOffloadingGroupStartFunction(torch.autograd.Function):
    """Identity that opens a group. Its output must not be changed in place: see NOTE [ Markers ].

    NOTE [ Markers ]
        The ``fine_grained_offloading_*`` functions do not change the graph and do not use these
        classes. An identity function changes numbers: if a tensor is used several times, it
        changes the order in which gradients are summed, and so their last bits. It also either
        refuses in-place operations on its output, or cuts the output's history from that of its
        input. Nor is a signal needed: backward reaches a group when it asks for the first of the
        group's tensors, and prefetch reloads the next groups before that.

    Source: Megatron-LM ``FineGrainedOffloadingGroupStartFunction``.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, cpu_offload_handler: Any, name: str) -> Tensor:
        """Open a group, unless inside a checkpoint or while offload is disabled."""
        ctx.chunk = None
        if not is_recomputing() and not cpu_offload_handler.leaves_out(name):
            ctx.chunk = cpu_offload_handler
            cpu_offload_handler.on_group_start_forward(name)
        return tensor

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        if ctx.chunk is not None:
            ctx.chunk.on_group_start_backward()
        return grad_output, None, None


class FineGrainedOffloadingGroupCommitFunction(torch.autograd.Function):
    """Identity that commits a group. Its output must not be changed in place: NOTE [ Markers ].

    Source: Megatron-LM ``FineGrainedOffloadingGroupCommitFunction``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        cur_forward_chunk: Chunk,
        name: str,
        forced_released_tensors: Sequence[Tensor] | None,
        delay_offload: bool,
    ) -> Tensor:
        """Commit a group, now or later, unless in a recomputation or started in a checkpoint."""
        ctx.group = None
        if not is_recomputing():
            group = cur_forward_chunk.commit(name, forced_released_tensors, delay=delay_offload)
            ctx.group = group if group.engine is not None else None  # None: the group was left out
        return tensor

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> tuple[Tensor, None, None, None, None]:
        if ctx.group is not None:
            ctx.group.on_use()
        return grad_output[0], None, None, None, None
