"""Activation offload for pipeline-parallel training: no changed numbers, less device memory.

Public names by task. Nothing is computed here.
"""

# One line around a schedule of torch.distributed.pipelining, or groups by module name. And what a
# forked process does, which registers itself.
from pp_offload import pipelining

# All activations of a model on one device.
from pp_offload._activations.context import NoOpManager, OffloadActivations
from pp_offload._activations.output_head import (
    get_act_offloading_ctx_manager,
    get_lora_act_offloading_ctx_manager,
)
from pp_offload._groups import forked as forked
from pp_offload._groups.current import configure, use_backend
from pp_offload._transfer.statistics import OffloadStatistics

# Devices.
from pp_offload.backends import AcceleratorBackend, CpuBackend

# Layers that are computed again.
from pp_offload.checkpointing import (
    ActivationCheckpointing,
    ActivationCheckpointingVariants,
    FullACParams,
    SelectiveLayerACParams,
    SelectiveOpACParams,
)
from pp_offload.config import OffloadConfig

# What may go wrong.
from pp_offload.errors import (
    ClosedError,
    ConfigError,
    DiskTierError,
    ForkedError,
    GroupStateError,
    OffloadError,
    RaceError,
    SavedTensorModifiedError,
    VerifyError,
)

# The reference's names.
from pp_offload.fine_grained_activation_offload import (
    DEBUG,
    DEBUG_RANK,
    ChunkOffloadHandler,
    FineGrainedActivationOffloadingInterface,
    FineGrainedOffloadingBackwardRecordFunction,
    FineGrainedOffloadingGroupCommitFunction,
    FineGrainedOffloadingGroupStartFunction,
    GPUTensorPool,
    OffloadTensorGroup,
    PipelineOffloadManager,
    debug_rank,
    fine_grained_offloading_backward_record,
    fine_grained_offloading_disable_offload,
    fine_grained_offloading_enable_offload,
    fine_grained_offloading_forward_record,
    fine_grained_offloading_group_commit,
    fine_grained_offloading_group_flush_delayed_groups,
    fine_grained_offloading_group_start,
    print_offload_summary_table,
)

# The Trainer of Hugging Face, without a dependence on it.
from pp_offload.integrations.huggingface import ActivationOffloadingMixin
from pp_offload.modules import offload_modules

# Parameters on the host.
from pp_offload.offload_model import OffloadModel

# Telling.
from pp_offload.summary import summary_table

__version__ = "0.1.0"

__all__ = [
    "DEBUG",
    "DEBUG_RANK",
    "AcceleratorBackend",
    "ActivationCheckpointing",
    "ActivationCheckpointingVariants",
    "ActivationOffloadingMixin",
    "ChunkOffloadHandler",
    "ClosedError",
    "ConfigError",
    "CpuBackend",
    "DiskTierError",
    "ForkedError",
    "FineGrainedActivationOffloadingInterface",
    "FineGrainedOffloadingBackwardRecordFunction",
    "FineGrainedOffloadingGroupCommitFunction",
    "FineGrainedOffloadingGroupStartFunction",
    "FullACParams",
    "GPUTensorPool",
    "GroupStateError",
    "NoOpManager",
    "OffloadActivations",
    "OffloadConfig",
    "OffloadError",
    "OffloadModel",
    "OffloadStatistics",
    "OffloadTensorGroup",
    "PipelineOffloadManager",
    "RaceError",
    "SavedTensorModifiedError",
    "SelectiveLayerACParams",
    "SelectiveOpACParams",
    "VerifyError",
    "configure",
    "debug_rank",
    "fine_grained_offloading_backward_record",
    "fine_grained_offloading_disable_offload",
    "fine_grained_offloading_enable_offload",
    "fine_grained_offloading_forward_record",
    "fine_grained_offloading_group_commit",
    "fine_grained_offloading_group_flush_delayed_groups",
    "fine_grained_offloading_group_start",
    "get_act_offloading_ctx_manager",
    "get_lora_act_offloading_ctx_manager",
    "offload_modules",
    "pipelining",
    "print_offload_summary_table",
    "summary_table",
    "use_backend",
]
