"""Activation offload for pipeline-parallel training: no changed numbers, less device memory.

Public names by task. Nothing is computed here, and what a name needs is imported when it is first
asked for: importing the package costs nearly nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Groups: in a schedule of torch.distributed.pipelining, by module name, or marked in a forward.
    from pp_offload import pipelining
    from pp_offload.config import OffloadConfig
    from pp_offload.modules import offload_modules
    from pp_offload.pipelining import attach

    # isort: split
    # All activations of a model on one device.
    from pp_offload.activations import (
        NoOpManager,
        OffloadActivations,
        OffloadHiddenStates,
        get_act_offloading_ctx_manager,
        get_lora_act_offloading_ctx_manager,
    )
    from pp_offload.integrations.huggingface import ActivationOffloadingMixin

    # isort: split
    # Layers that are recomputed.
    from pp_offload.checkpointing import (
        ActivationCheckpointedModelConfig,
        ActivationCheckpointing,
        ActivationCheckpointingVariants,
        CheckpointedModule,
        FullACParams,
        SelectiveLayerACParams,
        SelectiveOpACParams,
        apply_activation_checkpointing_fsdp1_inplace,
        checkpoint,
        checkpoint_function,
        checkpoint_wrapper,
        is_module_to_apply_activation_checkpointing,
        recompute_layers,
    )

    # isort: split
    # Parameters on the host.
    from pp_offload._slices.offloaded_layers import OffloadedLayers
    from pp_offload.integrations.layer_offloading import LayerOffloadingMixin
    from pp_offload.layers import offload_layers
    from pp_offload.offload_model import OffloadModel

    # isort: split
    # Options, devices, and what happened.
    from pp_offload._core.statistics import OffloadStatistics
    from pp_offload._megatron.current import configure, use_backend
    from pp_offload.backends import AcceleratorBackend, CpuBackend
    from pp_offload.summary import summary_table

    # isort: split
    # What may go wrong.
    from pp_offload.errors import (
        CaptureError,
        ClosedError,
        ConfigError,
        DiskTierError,
        ForkedError,
        GroupStateError,
        NotWhileCapturingError,
        OffloadError,
        OptionError,
        RaceError,
        SavedTensorModifiedError,
        TierError,
        VerifyError,
    )

    # isort: split
    # Megatron's names.
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

__version__ = "0.2.0"

__all__ = [
    "DEBUG",
    "DEBUG_RANK",
    "AcceleratorBackend",
    "ActivationCheckpointedModelConfig",
    "ActivationCheckpointing",
    "ActivationCheckpointingVariants",
    "ActivationOffloadingMixin",
    "CaptureError",
    "CheckpointedModule",
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
    "LayerOffloadingMixin",
    "NoOpManager",
    "NotWhileCapturingError",
    "OffloadActivations",
    "OffloadConfig",
    "OffloadError",
    "OffloadHiddenStates",
    "OffloadModel",
    "OffloadStatistics",
    "OffloadTensorGroup",
    "OffloadedLayers",
    "OptionError",
    "PipelineOffloadManager",
    "RaceError",
    "SavedTensorModifiedError",
    "SelectiveLayerACParams",
    "SelectiveOpACParams",
    "TierError",
    "VerifyError",
    "apply_activation_checkpointing_fsdp1_inplace",
    "attach",
    "checkpoint",
    "checkpoint_function",
    "checkpoint_wrapper",
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
    "is_module_to_apply_activation_checkpointing",
    "offload_layers",
    "offload_modules",
    "pipelining",
    "print_offload_summary_table",
    "recompute_layers",
    "summary_table",
    "use_backend",
]

_MODULES = {
    "pp_offload": ("pipelining",),
    "pp_offload.config": ("OffloadConfig",),
    "pp_offload.modules": ("offload_modules",),
    "pp_offload.pipelining": ("attach",),
    "pp_offload.activations": (
        "NoOpManager",
        "OffloadActivations",
        "OffloadHiddenStates",
        "get_act_offloading_ctx_manager",
        "get_lora_act_offloading_ctx_manager",
    ),
    "pp_offload.integrations.huggingface": ("ActivationOffloadingMixin",),
    "pp_offload.checkpointing": (
        "ActivationCheckpointedModelConfig",
        "ActivationCheckpointing",
        "ActivationCheckpointingVariants",
        "CheckpointedModule",
        "FullACParams",
        "SelectiveLayerACParams",
        "SelectiveOpACParams",
        "apply_activation_checkpointing_fsdp1_inplace",
        "checkpoint",
        "checkpoint_function",
        "checkpoint_wrapper",
        "is_module_to_apply_activation_checkpointing",
        "recompute_layers",
    ),
    "pp_offload._slices.offloaded_layers": ("OffloadedLayers",),
    "pp_offload.integrations.layer_offloading": ("LayerOffloadingMixin",),
    "pp_offload.layers": ("offload_layers",),
    "pp_offload.offload_model": ("OffloadModel",),
    "pp_offload._megatron.current": (
        "configure",
        "use_backend",
    ),
    "pp_offload._core.statistics": ("OffloadStatistics",),
    "pp_offload.backends": (
        "AcceleratorBackend",
        "CpuBackend",
    ),
    "pp_offload.summary": ("summary_table",),
    "pp_offload.errors": (
        "CaptureError",
        "ClosedError",
        "ConfigError",
        "DiskTierError",
        "ForkedError",
        "GroupStateError",
        "NotWhileCapturingError",
        "OffloadError",
        "OptionError",
        "RaceError",
        "SavedTensorModifiedError",
        "TierError",
        "VerifyError",
    ),
    "pp_offload.fine_grained_activation_offload": (
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
    ),
}
"""Where each name is, for who is no type checker."""

_WHERE = {name: module for module, names in _MODULES.items() for name in names}

if not TYPE_CHECKING:  # or a name that does not exist would be taken for one that may be anything

    def __getattr__(name: str) -> object:
        """Import a public name, which is an attribute from then on."""
        import importlib

        if name not in _WHERE:
            from pp_offload._common.checks import near

            known = near(name, __all__)
            raise AttributeError(f"module 'pp_offload' has no attribute {name!r}{known}")
        if _WHERE[name] == __name__:  # a module of the package, whose attribute it becomes
            return importlib.import_module(f"{__name__}.{name}")
        module = importlib.import_module(_WHERE[name])
        globals()[name] = found = getattr(module, name)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
