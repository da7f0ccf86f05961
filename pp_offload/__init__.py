"""Activation offload for pipeline-parallel training: no changed numbers, less device memory.

A public name is imported when it is first asked for: importing the package costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for type checkers and editors; a test compares both lists
    from pp_offload import pipelining as pipelining
    from pp_offload._core.statistics import OffloadStatistics as OffloadStatistics
    from pp_offload._groups.offloader import release_host_memory as release_host_memory
    from pp_offload._megatron.manager import configure as configure
    from pp_offload._megatron.manager import use_backend as use_backend
    from pp_offload._slices.offloaded_layers import OffloadedLayers as OffloadedLayers
    from pp_offload.activations import *
    from pp_offload.backends import AcceleratorBackend as AcceleratorBackend
    from pp_offload.backends import CpuBackend as CpuBackend
    from pp_offload.checkpointing import *
    from pp_offload.config import OffloadConfig as OffloadConfig
    from pp_offload.errors import *
    from pp_offload.fine_grained_activation_offload import *
    from pp_offload.integrations.huggingface import (
        ActivationOffloadingMixin as ActivationOffloadingMixin,
    )
    from pp_offload.integrations.huggingface import LayerOffloadingMixin as LayerOffloadingMixin
    from pp_offload.integrations.patches import patch as patch
    from pp_offload.layers import offload_layers as offload_layers
    from pp_offload.modules import offload_modules as offload_modules
    from pp_offload.offload_model import OffloadModel as OffloadModel
    from pp_offload.pipelining import attach as attach
    from pp_offload.summary import summary_table as summary_table

__version__ = "0.2.0"

_NAMES = {
    "": "pipelining",
    "_core.statistics": "OffloadStatistics",
    "_groups.offloader": "release_host_memory",
    "_megatron.manager": "configure use_backend",
    "_slices.offloaded_layers": "OffloadedLayers",
    "activations": """NoOpManager OffloadActivations OffloadHiddenStates
        get_act_offloading_ctx_manager get_lora_act_offloading_ctx_manager""",
    "backends": "AcceleratorBackend CpuBackend",
    "checkpointing": """ActivationCheckpointedModelConfig ActivationCheckpointing
        ActivationCheckpointingVariants CheckpointedModule FullACParams RecomputedLayers
        SelectiveLayerACParams SelectiveOpACParams apply_activation_checkpointing_fsdp1_inplace
        checkpoint checkpoint_function checkpoint_wrapper
        is_module_to_apply_activation_checkpointing recompute_layers""",
    "config": "OffloadConfig",
    "errors": """CaptureError ClosedError ConfigError DiskTierError ForkedError GroupStateError
        NotWhileCapturingError OffloadError OptionError RaceError SavedTensorModifiedError TierError
        VerifyError""",
    "fine_grained_activation_offload": """DEBUG DEBUG_RANK ChunkOffloadHandler
        FineGrainedActivationOffloadingInterface FineGrainedOffloadingBackwardRecordFunction
        FineGrainedOffloadingGroupCommitFunction FineGrainedOffloadingGroupStartFunction
        GPUTensorPool OffloadTensorGroup PipelineOffloadManager debug_rank
        fine_grained_offloading_backward_record fine_grained_offloading_disable_offload
        fine_grained_offloading_enable_offload fine_grained_offloading_forward_record
        fine_grained_offloading_group_commit fine_grained_offloading_group_flush_delayed_groups
        fine_grained_offloading_group_start print_offload_summary_table""",
    "integrations.huggingface": "ActivationOffloadingMixin LayerOffloadingMixin",
    "integrations.patches": "patch",
    "layers": "offload_layers",
    "modules": "offload_modules",
    "offload_model": "OffloadModel",
    "pipelining": "attach",
    "summary": "summary_table",
}
"""Public names by the module that has them; a public module is a name of the package itself."""

_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULES)

if not TYPE_CHECKING:  # or a name that does not exist would be taken for one that may be anything

    def __getattr__(name: str) -> object:
        """Import a public name, which is an attribute from then on."""
        import importlib

        if name not in _MODULES:
            raise AttributeError(f"module 'pp_offload' has no attribute {name!r}")
        module = importlib.import_module(f"{__name__}.{_MODULES[name] or name}")
        value = globals()[name] = getattr(module, name) if _MODULES[name] else module
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
