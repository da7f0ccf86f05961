"""The functions and classes of the reference, and how a table of signatures is compared with ours.

The table was written by hand from the reference's page. A method is ``name: (kind, parameters)``;
a parameter is its name, ``name=default``, ``*name`` or ``**name``.
"""

from __future__ import annotations

import inspect
from typing import Any

FUNCTIONS = {
    "debug_rank": ["message"],
    "print_offload_summary_table": ["total_offload_bytes"],
    "fine_grained_offloading_disable_offload": [],
    "fine_grained_offloading_enable_offload": [],
    "fine_grained_offloading_group_commit": [
        "tensor",
        "name",
        "forced_released_tensors=None",
        "delay_offload=False",
    ],
    "fine_grained_offloading_group_flush_delayed_groups": [],
    "fine_grained_offloading_group_start": ["tensor", "name=None"],
    "fine_grained_offloading_forward_record": ["event"],
    "fine_grained_offloading_backward_record": ["tensor", "event"],
}

CLASSES: dict[str, dict[str, tuple[str, list[str]]]] = {
    "GPUTensorPool": {
        "__init__": ("method", ["self", "device='cuda'", "pin_memory=False"]),
        "_get_pool_key": ("method", ["self", "shape", "dtype"]),
        "_calculate_memory_size": ("static", ["shape", "dtype"]),
        "allocate": ("method", ["self", "shape", "dtype=torch.float32"]),
        "free": ("method", ["self", "tensor"]),
        "get_pool_status": ("method", ["self", "shape=None", "dtype=None"]),
        "reset": ("method", ["self"]),
        "clear": ("method", ["self"]),
        "__del__": ("method", ["self"]),
    },
    "OffloadTensorGroup": {
        "__init__": ("method", ["self", "name"]),
        "push_tensor": ("method", ["self", "tag", "tensor"]),
        "pop_tensor": ("method", ["self", "tag"]),
        "record_offload_event": ("method", ["self", "stream"]),
        "wait_offload_event": ("method", ["self", "stream"]),
        "record_reload_event": ("method", ["self", "stream"]),
        "wait_reload_event": ("method", ["self", "stream"]),
        "update_offload_info": ("method", ["self", "tensor"]),
    },
    "PipelineOffloadManager": {
        "__init__": ("method", ["self"]),
        "get_instance": ("class", []),
        "reset_instance": ("class", []),
        "d2h_stream": ("property", ["self"]),
        "h2d_stream": ("property", ["self"]),
        "cpu_tensor_pool": ("property", ["self"]),
        "push_offload_groups": ("method", ["self", "group_hook", "forced_released_tensors"]),
        "flush_delayed_groups": ("method", ["self"]),
        "reset": ("method", ["self"]),
        "offload_summary_bytes": ("property", ["self"]),
        "offload_summary_total_bytes": ("property", ["self"]),
        "flush": ("method", ["self"]),
        "disable_offload": ("method", ["self"]),
        "enable_offload": ("method", ["self"]),
        "post_warmup_callback": ("method", ["self"]),
        "push": ("method", ["self", "handler"]),
        "pop_backward_chunk": ("method", ["self", "name=None"]),
        "front_backward_chunk": ("method", ["self", "name=None"]),
        "init_model_chunk_offload_handler": (
            "method",
            ["self", "vp_size", "vp_stage", "min_offloaded_tensor_size=1048576"],
        ),
        "pop_forward_chunk": ("method", ["self", "name=None"]),
        "cur_forward_chunk": ("method", ["self"]),
        "cur_backward_chunk": ("method", ["self"]),
        "mark_not_offloadable": ("method", ["self", "tensor"]),
        "__enter__": ("method", ["self"]),
        "__exit__": ("method", ["self", "*args"]),
        "on_save_for_backward": ("method", ["self", "tensor"]),
        "on_get_saved_tensor": ("method", ["self", "saved_state"]),
    },
    "ChunkOffloadHandler": {
        "__init__": ("method", ["self", "min_offloaded_tensor_size", "cpu_tensor_pool"]),
        "offload": ("method", ["self", "src_tensor", "pin_memory=True", "use_cpu_pool=True"]),
        "reload": ("method", ["self", "state", "non_blocking=None"]),
        "reset": ("method", ["self"]),
        "find_group_with_name": ("method", ["self", "name", "start_index=0"]),
        "is_empty_chunk": ("method", ["self", "name=None"]),
        "finish_all_groups": ("method", ["self", "name=None"]),
        "find_next_group": ("method", ["self", "name=None"]),
        "tensor_push": ("method", ["self", "tensor"]),
        "tensor_pop": ("method", ["self", "tensor_tag"]),
        "tensor_need_offloading_checker": ("method", ["self", "tensor"]),
        "bulk_offload_group": ("method", ["self"]),
        "get_max_deduplicated_groups": ("method", ["self"]),
        "bulk_reload_group": ("method", ["self"]),
        "pre_reload_last_layer": ("method", ["self"]),
        "should_bulk_offload": ("method", ["self"]),
        "bulk_offload": ("method", ["self", "forced_released_tensors"]),
        "on_group_commit_forward": ("method", ["self", "forced_released_tensors"]),
        "bulk_reload": ("method", ["self"]),
        "on_group_commit_backward": ("method", ["self", "name"]),
        "on_group_start_forward": ("method", ["self", "name"]),
        "on_group_start_backward": ("method", ["self"]),
    },
    "FineGrainedOffloadingGroupCommitFunction": {
        "forward": (
            "static",
            [
                "ctx",
                "tensor",
                "cur_forward_chunk",
                "name",
                "forced_released_tensors",
                "delay_offload",
            ],
        ),
        "backward": ("static", ["ctx", "*grad_output"]),
    },
    "FineGrainedOffloadingGroupStartFunction": {
        "forward": ("static", ["ctx", "tensor", "cpu_offload_handler", "name"]),
        "backward": ("static", ["ctx", "grad_output"]),
    },
    "FineGrainedOffloadingBackwardRecordFunction": {
        "forward": ("static", ["ctx", "tensor", "event"]),
        "backward": ("static", ["ctx", "grad_output"]),
    },
    "FineGrainedActivationOffloadingInterface": {
        "__init__": ("method", ["self", "offload", "tensor", "name"]),
        "__enter__": ("method", ["self"]),
        "__exit__": ("method", ["self", "*args"]),
        "init_chunk_handler": ("static", ["vp_size", "vp_stage", "min_offloaded_tensor_size"]),
        "get_context": ("static", ["flag"]),
        "group_commit": (
            "static",
            ["tensor", "name", "forced_released_tensors=None", "delay_offload=False"],
        ),
        "mark_not_offloadable": ("static", ["tensor"]),
        "forward_record": ("static", ["event"]),
        "reset": ("static", []),
        "reset_instance": ("static", []),
    },
}


def parameters(function: Any) -> list[str]:
    """The parameters of ``function`` in the table's notation, without our keyword-only ones."""
    results = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            assert parameter.default is not parameter.empty, f"{parameter} needs a default"
            continue
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        text = stars.get(parameter.kind, "") + parameter.name
        if parameter.default is not parameter.empty:
            text += f"={parameter.default!r}"
        results.append(text)
    return results


def is_ours(owner: type, name: str) -> bool:
    """Whether one of our classes defines it: torch's and Python's have such names, too."""
    ours = [cls for cls in owner.__mro__ if cls.__module__.split(".")[0] == "pp_offload"]
    return any(name in vars(cls) for cls in ours)


def kind_of(owner: type, name: str) -> str:
    attribute = inspect.getattr_static(owner, name)
    if isinstance(attribute, staticmethod):
        return "static"
    if isinstance(attribute, classmethod):
        return "class"
    return "property" if isinstance(attribute, property) else "method"
