"""The names of Megatron-LM's main, written by hand from its module and its call sites.

What a user or another module of Megatron may call; names with an underscore are left out. A method
is ``name: (kind, parameters)``, as in ``helpers.reference``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from helpers import reference

Methods = Mapping[str, tuple[str, list[str]]]

GROUP = "process_group=None"
"""Calls give it by name; the default is ours."""

FUNCTIONS: Mapping[str, list[str]] = {
    "debug_rank": ["message"],
    "print_offload_summary_table": [
        "total_offload_bytes",
        "local_duplicate_summary=None",
        GROUP,
    ],
    "fine_grained_offloading_disable_offload": [],
    "fine_grained_offloading_enable_offload": [],
    "fine_grained_offloading_group_start": ["tensor", "name=None"],
    "fine_grained_offloading_group_offload": [
        "tensor",
        "name",
        "forced_released_tensors=None",
        "delay_offload=False",
    ],
    "fine_grained_offloading_group_flush_delayed_groups": [],
}


def method(*parameters: str) -> tuple[str, list[str]]:
    return "method", ["self", *parameters]


def changed(name: str, **others: tuple[str, list[str]] | None) -> Methods:
    """The methods of a class as it was introduced, with those that main has changed; None: gone."""
    methods = {**reference.CLASSES[name], **others}
    return {name: kind for name, kind in methods.items() if kind is not None}


OPTIONS = ["delta_offload_bytes_across_pp_ranks", "activation_offload_fraction"]
NAMED = ("name", "forced_released_tensors")

CLASSES: Mapping[str, Methods] = {
    "OffloadTensorPool": changed(
        "GPUTensorPool", _get_pool_key=None, _calculate_memory_size=None, __del__=None
    ),
    "OffloadTensorGroup": changed(
        "OffloadTensorGroup", set_duplicate_storage_info=method("tensor_count", "duplicate_bytes")
    ),
    "PipelineOffloadManager": changed(
        "PipelineOffloadManager",
        cuda_graph_stream=("property", ["self"]),
        cuda_graph_event=("property", ["self"]),
        push_offload_groups=method("group_hook", *NAMED),
        reset=method(GROUP),
        post_warmup_callback=method(GROUP),
        init_model_chunk_offload_handler=method(
            "pp_rank",
            "vp_size",
            "vp_stage",
            "min_offloaded_tensor_size=1048576",
            f"{OPTIONS[0]}=0",
            f"{OPTIONS[1]}=1.0",
            "max_inflight_offloads=None",
        ),
        mark_not_offloadable=None,
        mark_not_offload=method("tensor"),
    ),
    "ChunkOffloadHandler": changed(
        "ChunkOffloadHandler",
        __init__=method(
            "min_offloaded_tensor_size", "cpu_tensor_pool", "max_inflight_offloads=None"
        ),
        find_group_with_name=method("groups", "name", "start_index=0"),
        bulk_offload_group=method("group_to_offload"),
        should_bulk_offload=method("group"),
        bulk_offload=method(*NAMED),
        on_group_commit_forward=method(*NAMED),
    ),
    "FineGrainedOffloadingGroupCommitFunction": changed("FineGrainedOffloadingGroupCommitFunction"),
    "FineGrainedOffloadingGroupStartFunction": changed("FineGrainedOffloadingGroupStartFunction"),
    "FineGrainedOffloadingBackwardRecordFunction": changed(
        "FineGrainedOffloadingBackwardRecordFunction", forward=("static", ["ctx", "tensor"])
    ),
    "FineGrainedActivationOffloadingInterface": changed(
        "FineGrainedActivationOffloadingInterface",
        cuda_graph_stream=("static", []),
        cuda_graph_event=("static", []),
        init_chunk_handler=(
            "static",
            [
                "pp_rank",
                "vp_size",
                "vp_stage",
                "min_offloaded_tensor_size",
                *OPTIONS,
                "max_inflight_offloads=None",
            ],
        ),
        group_commit=None,
        group_offload=method("tensor", "forced_released_tensors=None", "delay_offload=False"),
        mark_not_offloadable=None,
        mark_not_offload=("static", ["tensor"]),
        forward_record=("static", []),
        backward_record=("static", ["tensor"]),
        reset=("static", [GROUP]),
        flush_delayed_groups=("static", []),
        disable_offload=("static", []),
        enable_offload=("static", []),
        enter_replay=("static", []),
        exit_replay=("static", []),
    ),
}

INTERFACE = "FineGrainedActivationOffloadingInterface"

OURS_TAKES_MORE = {
    f"{INTERFACE}.init_chunk_handler",
    f"{INTERFACE}.forward_record",
    "PipelineOffloadManager.init_model_chunk_offload_handler",
}
"""Where our parameters have defaults that theirs have not, or there is one more."""


def names() -> Iterator[tuple[str, str]]:
    """All names as owner and name; no owner for those of the module."""
    yield from (("", name) for name in FUNCTIONS)
    for owner, methods in CLASSES.items():
        yield "", owner
        yield from ((owner, name) for name in methods)
