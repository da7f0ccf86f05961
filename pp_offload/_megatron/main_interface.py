"""What a layer of Megatron-LM's main calls.

    off_interface.init_chunk_handler(pp_rank, vp_size, vp_stage, 2**20, 0, 1.0)

    group = off_interface(offload, x, "mlp_norm")  # one object for each group that runs
    with group as x:
        y = self.norm(x)
    y = group.group_offload(y, forced_released_tensors=[residual])

Calls as version 0.16 writes them work as well, where they do not mean something else: arguments of
:meth:`~FineGrainedActivationOffloadingInterface.init_chunk_handler` by name, ``group_commit``,
``mark_not_offloadable``, and ``forward_record`` with an event.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pp_offload._common.checks import check_switch
from pp_offload._groups.chunk import Chunk
from pp_offload._megatron import interface as introduced
from pp_offload._megatron.cuda_graph import graph_event, record_and_join
from pp_offload._megatron.main_manager import PipelineOffloadManager
from pp_offload._megatron.markers import FineGrainedOffloadingGroupCommitFunction as _Commit


def fine_grained_offloading_group_offload(
    tensor: Any,
    name: str,
    forced_released_tensors: Sequence[Tensor] | None = None,
    delay_offload: bool = False,
) -> Any:
    """Close a group and queue the copies of its tensors to the host.

    Args:
        tensor: The group's output, or a tuple, list or dict of outputs; its structure is kept.
        name: What the group was started with.
        forced_released_tensors: Tensors to empty after the copy although something still refers
            to them. One whose storage anybody else shares is left alone.
        delay_offload: While a graph is launched, only queue the commit until
            ``flush_delayed_groups``; at other times it is done at once.

    Returns:
        ``tensor`` itself.

    Raises:
        GroupStateError: There is no chunk, or no open group of this name.
        ValueError: ``delay_offload`` is neither on nor off.
    """
    is_delayed = _is_delayed(delay_offload)
    return introduced.fine_grained_offloading_group_commit(
        tensor, name, forced_released_tensors, is_delayed
    )


def _is_delayed(delay_offload: bool) -> bool:
    check_switch("delay_offload", delay_offload)
    return bool(delay_offload) and PipelineOffloadManager.get_instance().graphs.is_in_replay


class FineGrainedOffloadingGroupCommitFunction(_Commit):
    """Identity that commits a group; with ``delay_offload`` later, while a graph is launched.

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
        """Commit group ``name`` of the chunk. Does nothing in a recomputation."""
        return _Commit.forward(
            ctx,
            tensor,
            cur_forward_chunk,  # type: ignore[arg-type]
            name,
            forced_released_tensors,
            _is_delayed(delay_offload),
        )


class FineGrainedOffloadingBackwardRecordFunction(torch.autograd.Function):
    """Identity whose backward records the manager's event and joins the copies to the device.

    Source: Megatron-LM ``FineGrainedOffloadingBackwardRecordFunction``.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        """``tensor`` as it is."""
        return tensor

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor]:
        """Record the event on the current stream, which then waits for the h2d stream."""
        record_and_join(graph_event(PipelineOffloadManager.get_instance()))
        return (grad_output,)


class FineGrainedActivationOffloadingInterface(introduced.FineGrainedActivationOffloadingInterface):
    """A group as a context, closed by :meth:`group_offload`.

    Args:
        offload: If False, nothing happens but that ``with`` gives back ``tensor``, and
            :meth:`group_offload` its own.
        tensor: The group's input.
        name: Of the group.

    Source: Megatron-LM ``FineGrainedActivationOffloadingInterface``.
    """

    def group_offload(
        self,
        tensor: Any,
        forced_released_tensors: Sequence[Tensor] | None = None,
        delay_offload: bool = False,
    ) -> Any:
        """Close the group; see :func:`fine_grained_offloading_group_offload`."""
        if not self.offload:
            return tensor
        return fine_grained_offloading_group_offload(
            tensor, self.name, forced_released_tensors, delay_offload
        )

    @staticmethod
    def init_chunk_handler(  # type: ignore[override]
        pp_rank: int | None = None,
        vp_size: int | None = None,
        vp_stage: int | None = None,
        min_offloaded_tensor_size: int = 1024 * 1024,
        delta_offload_bytes_across_pp_ranks: int = 0,
        activation_offload_fraction: float = 1.0,
        max_inflight_offloads: int | None = None,
    ) -> None:
        """Begin the forward of one microbatch; see
        :meth:`PipelineOffloadManager.init_model_chunk_offload_handler`.
        """
        PipelineOffloadManager.get_instance().init_model_chunk_offload_handler(
            pp_rank,
            vp_size,
            vp_stage,
            min_offloaded_tensor_size,
            delta_offload_bytes_across_pp_ranks,
            activation_offload_fraction,
            max_inflight_offloads,
        )

    @staticmethod
    def get_context(flag: bool) -> AbstractContextManager[object]:
        """The manager, as a context that saves tensors through it; or one that does nothing."""
        return PipelineOffloadManager.get_instance() if flag else nullcontext()

    @staticmethod
    def mark_not_offload(tensor: Tensor | None) -> None:
        """Keep ``tensor`` and its views on the device; None is ignored."""
        PipelineOffloadManager.get_instance().mark_not_offload(tensor)

    @staticmethod
    def reset(process_group: dist.ProcessGroup | None = None) -> None:
        """Begin a step: close the last one. Takes part in no collective.

        Args:
            process_group: Accepted for Megatron-LM; see :meth:`PipelineOffloadManager.reset`.
        """
        PipelineOffloadManager.get_instance().reset(process_group)

    # CUDA graphs

    @staticmethod
    def cuda_graph_stream() -> Any:
        """The stream to capture and launch graphs on."""
        return PipelineOffloadManager.get_instance().cuda_graph_stream

    @staticmethod
    def cuda_graph_event() -> Any:
        """Recorded at the end of a captured forward and of a captured backward."""
        return PipelineOffloadManager.get_instance().cuda_graph_event

    @staticmethod
    def forward_record(event: Any = None) -> None:
        """At the end of a captured forward: record the event, and join the copies to the host.

        Args:
            event: The one of :meth:`cuda_graph_event` when None.
        """
        if event is None:
            event = graph_event(PipelineOffloadManager.get_instance())
        introduced.FineGrainedActivationOffloadingInterface.forward_record(event)

    @staticmethod
    def backward_record(tensor: Tensor) -> Tensor:
        """``tensor``; in its backward the event is recorded and the copies to the device joined."""
        return FineGrainedOffloadingBackwardRecordFunction.apply(tensor)

    @staticmethod
    def enter_replay() -> None:
        """A graph is launched: from now on commits that may be delayed are."""
        PipelineOffloadManager.get_instance().enter_replay()

    @staticmethod
    def exit_replay() -> None:
        """From now on commits are done at once."""
        PipelineOffloadManager.get_instance().exit_replay()

    @staticmethod
    def flush_delayed_groups() -> None:
        """Do the commits that were delayed, in forward order. Does nothing in a recomputation."""
        introduced.fine_grained_offloading_group_flush_delayed_groups()

    # Switches

    @staticmethod
    def disable_offload() -> None:
        """From now on nothing is offloaded. A group that starts meanwhile is left to autograd."""
        introduced.fine_grained_offloading_disable_offload()

    @staticmethod
    def enable_offload() -> None:
        """Offload again."""
        introduced.fine_grained_offloading_enable_offload()
