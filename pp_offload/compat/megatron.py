"""Megatron-LM's module for fine-grained activation offload, as its main branch calls it.

One line puts it in the place of theirs, before anything of Megatron is imported::

    import sys
    import pp_offload.compat.megatron as ours

    sys.modules["megatron.core.pipeline_parallel.fine_grained_activation_offload"] = ours

docs/megatron.md has what differs. The names as they were when the module was introduced are in
:mod:`pp_offload.fine_grained_activation_offload`.
"""

from __future__ import annotations

import sys

from pp_offload._common.processes import logger_of
from pp_offload._megatron.chunk import MainChunkOffloadHandler as ChunkOffloadHandler
from pp_offload._megatron.chunk import OffloadTensorGroup
from pp_offload._megatron.interface import (
    FineGrainedOffloadingGroupCommitFunction,
    FineGrainedOffloadingGroupStartFunction,
    fine_grained_offloading_disable_offload,
    fine_grained_offloading_enable_offload,
    fine_grained_offloading_group_flush_delayed_groups,
    fine_grained_offloading_group_start,
)
from pp_offload._megatron.main import (
    FineGrainedActivationOffloadingInterface,
    FineGrainedOffloadingBackwardRecordFunction,
    PipelineOffloadManager,
    fine_grained_offloading_group_offload,
)
from pp_offload._memory.pool import GPUTensorPool as OffloadTensorPool
from pp_offload.fine_grained_activation_offload import log_on_rank
from pp_offload.summary import print_offload_summary_table

logger = logger_of(__name__)

THEIRS = "megatron.core.pipeline_parallel.fine_grained_activation_offload"
"""Megatron's own module."""

if THEIRS in sys.modules:  # modules that imported it keep it, without any sign
    logger.warning(
        "%s is imported already, so parts of Megatron may use it and not this engine; put "
        "pp_offload.compat.megatron into sys.modules before anything of Megatron is imported",
        THEIRS,
    )

DEBUG = False
"""True if :func:`debug_rank` logs. Set it in this module."""

DEBUG_RANK = 0
"""Rank on which :func:`debug_rank` logs."""


def debug_rank(message: str) -> None:
    """Log ``message`` on rank :data:`DEBUG_RANK` when :data:`DEBUG` is set."""
    if DEBUG:
        log_on_rank(message, DEBUG_RANK)


__all__ = [
    "DEBUG",
    "DEBUG_RANK",
    "ChunkOffloadHandler",
    "FineGrainedActivationOffloadingInterface",
    "FineGrainedOffloadingBackwardRecordFunction",
    "FineGrainedOffloadingGroupCommitFunction",
    "FineGrainedOffloadingGroupStartFunction",
    "OffloadTensorGroup",
    "OffloadTensorPool",
    "PipelineOffloadManager",
    "debug_rank",
    "fine_grained_offloading_disable_offload",
    "fine_grained_offloading_enable_offload",
    "fine_grained_offloading_group_flush_delayed_groups",
    "fine_grained_offloading_group_offload",
    "fine_grained_offloading_group_start",
    "print_offload_summary_table",
]
