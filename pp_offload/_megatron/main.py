"""Interface and manager that layers of Megatron-LM's main call.

    off_interface.init_chunk_handler(pp_rank, vp_size, vp_stage, 2**20, 0, 1.0)

Calls of version 0.16 work as well, unless main gives them another meaning: arguments of
``init_chunk_handler`` by name, ``group_commit``, ``mark_not_offloadable``, and ``forward_record``
with an event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pp_offload._common.checks import check_count
from pp_offload._megatron import interface as base
from pp_offload._megatron import manager as base_manager
from pp_offload._megatron.chunk import MainChunkOffloadHandler
from pp_offload.config import AUTO, OffloadConfig

the_manager = base_manager.PipelineOffloadManager.get_instance
"""Function that returns the manager of the process, made at the first call."""


class PipelineOffloadManager(base_manager.PipelineOffloadManager):
    """The manager of the process under main's names, some of which have other parameters.

    An object has no state: attributes are those of the manager of the process.

    Source: Megatron-LM ``PipelineOffloadManager``.
    """

    def __init__(self) -> None:
        """Make no manager: a process has one."""

    def __getattr__(self, name: str) -> Any:
        return getattr(the_manager(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(the_manager(), name, value)

    @classmethod
    def get_instance(cls) -> PipelineOffloadManager:
        """Return the manager of the process."""
        return _FACE

    @property
    def cuda_graph_stream(self) -> Any:
        """Stream to capture and launch graphs on; without CUDA, the live stream."""
        if self.backend.device.type != "cuda":
            return self.backend.current_stream()
        self.graph_stream = self.graph_stream or torch.cuda.Stream(self.backend.device)
        return self.graph_stream

    @property
    def cuda_graph_event(self) -> Any:
        """Event recorded at the end of a captured forward and of a captured backward, external so
        that work outside the graph may wait for it; None without CUDA.
        """
        if self.graph_event is None and self.backend.device.type == "cuda":
            self.graph_event = torch.cuda.Event(external=True)
        return self.graph_event

    def init_model_chunk_offload_handler(  # type: ignore[override]
        self,
        pp_rank: int | None = None,
        vp_size: int | None = None,
        vp_stage: int | None = None,
        min_offloaded_tensor_size: int = 1024 * 1024,
        delta_offload_bytes_across_pp_ranks: int = 0,
        activation_offload_fraction: float = 1.0,
        max_inflight_offloads: int | None = None,
    ) -> None:
        """Begin the forward of one microbatch on one model chunk.

        Args:
            pp_rank: Rank in the pipeline; None keeps the current rank, at first 0.
            vp_size, vp_stage, min_offloaded_tensor_size: See :meth:`Manager.begin_chunk`.
            delta_offload_bytes_across_pp_ranks, activation_offload_fraction: Replace the options
                of these names, unless they are Megatron's defaults, 0 and 1.0. In any case
                ``device_limit_bytes="auto"`` means no limit here, as fractions say what stays.
            max_inflight_offloads: See :class:`MainChunkOffloadHandler`.

        Raises:
            ConfigError: An option has an impossible value, or the manager has a plan already.
            ValueError: ``vp_stage`` is outside ``vp_size``, or ``pp_rank`` is no rank.
        """
        if pp_rank is not None:
            check_count("pp_rank", pp_rank)
            self.step.pipeline_rank = pp_rank  # begin_chunk may take the plan of this rank
        self.step.options = _options(
            self.config, delta_offload_bytes_across_pp_ranks, activation_offload_fraction
        )
        make = partial(
            MainChunkOffloadHandler,
            cpu_tensor_pool=None,
            max_inflight_offloads=max_inflight_offloads,
        )
        the_manager().begin_chunk(vp_size, vp_stage, min_offloaded_tensor_size, make=make)

    def reset(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Close the last step and begin the next. Takes part in no collective.

        Args:
            process_group: Accepted for Megatron-LM, whose reset gathers a summary. Here
                ``print_offload_summary_table`` gathers it.

        Raises:
            GroupStateError: See :meth:`pp_offload.PipelineOffloadManager.reset`.
        """
        the_manager().reset()

    def post_warmup_callback(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Derive the plan and the summary from the first complete step; see :meth:`reset`."""
        the_manager().post_warmup_callback()

    def mark_not_offload(self, tensor: Tensor | None) -> None:
        """Keep ``tensor`` and every view of it on the device; None is ignored."""
        if tensor is not None:
            self.mark_not_offloadable(tensor)

    def push_offload_groups(  # type: ignore[override]
        self,
        group_hook: Callable[[str, Sequence[Tensor] | None], None],
        name: str,
        forced_released_tensors: Sequence[Tensor] | None,
    ) -> None:
        super().push_offload_groups(partial(group_hook, name), forced_released_tensors)


_FACE = PipelineOffloadManager()

fine_grained_offloading_group_offload = base.fine_grained_offloading_group_commit
_BackwardRecord = base.FineGrainedOffloadingBackwardRecordFunction


class FineGrainedOffloadingBackwardRecordFunction(_BackwardRecord):
    """Identity whose backward records the manager's event and joins the copies to the device.

    Source: Megatron-LM ``FineGrainedOffloadingBackwardRecordFunction``.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:  # type: ignore[override]
        return _BackwardRecord.forward(ctx, tensor, _FACE.cuda_graph_event)


class FineGrainedActivationOffloadingInterface(base.FineGrainedActivationOffloadingInterface):
    """A group as a context, closed by :meth:`group_offload`.

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

    init_chunk_handler = staticmethod(  # type: ignore[assignment]
        _FACE.init_model_chunk_offload_handler
    )
    mark_not_offload = staticmethod(_FACE.mark_not_offload)
    reset = staticmethod(_FACE.reset)
    flush_delayed_groups = staticmethod(base.fine_grained_offloading_group_flush_delayed_groups)
    disable_offload = staticmethod(base.fine_grained_offloading_disable_offload)
    enable_offload = staticmethod(base.fine_grained_offloading_enable_offload)

    # CUDA graphs

    @staticmethod
    def cuda_graph_stream() -> Any:
        return _FACE.cuda_graph_stream

    @staticmethod
    def cuda_graph_event() -> Any:
        return _FACE.cuda_graph_event

    @staticmethod
    def forward_record(event: Any = None) -> None:
        """At the end of a captured forward: record the event, and join the copies to the host."""
        event = _FACE.cuda_graph_event if event is None else event
        base.fine_grained_offloading_forward_record(event)

    @staticmethod
    def backward_record(tensor: Tensor) -> Tensor:
        """Return ``tensor``; its backward records the event and joins the copies to the device."""
        return FineGrainedOffloadingBackwardRecordFunction.apply(tensor)

    @staticmethod
    def enter_replay() -> None:
        """Begin the launch of a graph: commits with ``delay_offload=True`` are delayed."""
        the_manager().step.is_in_replay = True

    @staticmethod
    def exit_replay() -> None:
        """End the launch of a graph. Delayed commits wait for a flush or the next step."""
        the_manager().step.is_in_replay = False


@lru_cache(maxsize=8)
def _options(config: OffloadConfig, delta_bytes: int, fraction: float) -> OffloadConfig | None:
    """Return the options of the plan; None for the manager's options."""
    options: dict[str, Any] = {}
    if (delta_bytes, fraction) != (0, 1):
        options["delta_offload_bytes_across_pp_ranks"] = delta_bytes
        options["activation_offload_fraction"] = fraction
    if config.limit == AUTO:
        options["device_limit_bytes"] = None
    return replace(config, **options) if options else None
