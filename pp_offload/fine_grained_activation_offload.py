"""The reference's module: a Megatron import line changes only its package.

    from pp_offload.fine_grained_activation_offload import (
        FineGrainedActivationOffloadingInterface as off_interface,
    )
"""

from pp_offload.chunk import ChunkOffloadHandler
from pp_offload.cuda_graph import (
    FineGrainedOffloadingBackwardRecordFunction,
    fine_grained_offloading_backward_record,
    fine_grained_offloading_forward_record,
)
from pp_offload.functions import (
    FineGrainedOffloadingGroupCommitFunction,
    FineGrainedOffloadingGroupStartFunction,
)
from pp_offload.group import OffloadTensorGroup
from pp_offload.interface import (
    FineGrainedActivationOffloadingInterface,
    fine_grained_offloading_disable_offload,
    fine_grained_offloading_enable_offload,
    fine_grained_offloading_group_commit,
    fine_grained_offloading_group_flush_delayed_groups,
    fine_grained_offloading_group_start,
)
from pp_offload.manager import PipelineOffloadManager
from pp_offload.report import DEBUG, DEBUG_RANK, debug_rank, print_offload_summary_table
from pp_offload.tiers.pool import GPUTensorPool

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
