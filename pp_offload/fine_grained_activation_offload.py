"""The reference's module: a Megatron import line changes only its package.

from pp_offload.fine_grained_activation_offload import (
    FineGrainedActivationOffloadingInterface as off_interface,
)
"""

from __future__ import annotations

from pp_offload._common.processes import logger_of, own_rank
from pp_offload._megatron.chunk import ChunkOffloadHandler, OffloadTensorGroup
from pp_offload._megatron.interface import (
    FineGrainedActivationOffloadingInterface,
    FineGrainedOffloadingBackwardRecordFunction,
    FineGrainedOffloadingGroupCommitFunction,
    FineGrainedOffloadingGroupStartFunction,
    fine_grained_offloading_backward_record,
    fine_grained_offloading_disable_offload,
    fine_grained_offloading_enable_offload,
    fine_grained_offloading_forward_record,
    fine_grained_offloading_group_commit,
    fine_grained_offloading_group_flush_delayed_groups,
    fine_grained_offloading_group_start,
)
from pp_offload._megatron.manager import PipelineOffloadManager
from pp_offload._memory.pool import GPUTensorPool
from pp_offload.summary import print_offload_summary_table

logger = logger_of(__name__)

DEBUG = False
"""Whether :func:`debug_rank` logs anything. Set it here, in this module."""

DEBUG_RANK = 0
"""Rank on which :func:`debug_rank` logs."""


def debug_rank(message: str) -> None:
    """Log ``message`` on rank :data:`DEBUG_RANK` when :data:`DEBUG` is set."""
    if DEBUG:
        log_on_rank(message, DEBUG_RANK)


def log_on_rank(message: str, rank: int) -> None:
    """Log ``message`` on this rank alone, as a warning."""
    if (own_rank() or 0) == rank:
        logger.warning("%s", message)


__all__ = [
    "DEBUG",
    "DEBUG_RANK",
    "ChunkOffloadHandler",
    "FineGrainedActivationOffloadingInterface",
    "FineGrainedOffloadingBackwardRecordFunction",
    "FineGrainedOffloadingGroupCommitFunction",
    "FineGrainedOffloadingGroupStartFunction",
    "GPUTensorPool",
    "OffloadTensorGroup",
    "PipelineOffloadManager",
    "debug_rank",
    "fine_grained_offloading_backward_record",
    "fine_grained_offloading_disable_offload",
    "fine_grained_offloading_enable_offload",
    "fine_grained_offloading_forward_record",
    "fine_grained_offloading_group_commit",
    "fine_grained_offloading_group_flush_delayed_groups",
    "fine_grained_offloading_group_start",
    "print_offload_summary_table",
]
