"""The names of Megatron-LM's main, written by hand from its module and its call sites.

What a user or another module of Megatron may call; names with an underscore are left out. A method
is ``name: (kind, parameters)``, as in ``helpers.reference``. docs/megatron.md has the table
that this makes:

    python tests/compat/megatron_main.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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

POOL: Methods = {
    "__init__": ("method", ["self", "device='cuda'", "pin_memory=False"]),
    "allocate": ("method", ["self", "shape", "dtype=torch.float32"]),
    "free": ("method", ["self", "tensor"]),
    "get_pool_status": ("method", ["self", "shape=None", "dtype=None"]),
    "reset": ("method", ["self"]),
    "clear": ("method", ["self"]),
}

CLASSES: Mapping[str, Methods] = {
    "OffloadTensorPool": POOL,
    "OffloadTensorGroup": {
        "__init__": ("method", ["self", "name"]),
        "push_tensor": ("method", ["self", "tag", "tensor"]),
        "pop_tensor": ("method", ["self", "tag"]),
        "record_offload_event": ("method", ["self", "stream"]),
        "wait_offload_event": ("method", ["self", "stream"]),
        "record_reload_event": ("method", ["self", "stream"]),
        "wait_reload_event": ("method", ["self", "stream"]),
        "update_offload_info": ("method", ["self", "tensor"]),
        "set_duplicate_storage_info": ("method", ["self", "tensor_count", "duplicate_bytes"]),
    },
    "PipelineOffloadManager": {
        "__init__": ("method", ["self"]),
        "get_instance": ("class", []),
        "reset_instance": ("class", []),
        "d2h_stream": ("property", ["self"]),
        "h2d_stream": ("property", ["self"]),
        "cuda_graph_stream": ("property", ["self"]),
        "cuda_graph_event": ("property", ["self"]),
        "cpu_tensor_pool": ("property", ["self"]),
        "push_offload_groups": (
            "method",
            ["self", "group_hook", "name", "forced_released_tensors"],
        ),
        "flush_delayed_groups": ("method", ["self"]),
        "reset": ("method", ["self", GROUP]),
        "offload_summary_bytes": ("property", ["self"]),
        "offload_summary_total_bytes": ("property", ["self"]),
        "flush": ("method", ["self"]),
        "disable_offload": ("method", ["self"]),
        "enable_offload": ("method", ["self"]),
        "post_warmup_callback": ("method", ["self", GROUP]),
        "push": ("method", ["self", "handler"]),
        "pop_backward_chunk": ("method", ["self", "name=None"]),
        "front_backward_chunk": ("method", ["self", "name=None"]),
        "init_model_chunk_offload_handler": (
            "method",
            [
                "self",
                "pp_rank",
                "vp_size",
                "vp_stage",
                "min_offloaded_tensor_size=1048576",
                "delta_offload_bytes_across_pp_ranks=0",
                "activation_offload_fraction=1.0",
                "max_inflight_offloads=None",
            ],
        ),
        "pop_forward_chunk": ("method", ["self", "name=None"]),
        "cur_forward_chunk": ("method", ["self"]),
        "cur_backward_chunk": ("method", ["self"]),
        "mark_not_offload": ("method", ["self", "tensor"]),
        "__enter__": ("method", ["self"]),
        "__exit__": ("method", ["self", "*args"]),
        "on_save_for_backward": ("method", ["self", "tensor"]),
        "on_get_saved_tensor": ("method", ["self", "saved_state"]),
    },
    "ChunkOffloadHandler": {
        "__init__": (
            "method",
            [
                "self",
                "min_offloaded_tensor_size",
                "cpu_tensor_pool",
                "max_inflight_offloads=None",
            ],
        ),
        "offload": ("method", ["self", "src_tensor", "pin_memory=True", "use_cpu_pool=True"]),
        "reload": ("method", ["self", "state", "non_blocking=None"]),
        "reset": ("method", ["self"]),
        "find_group_with_name": ("method", ["self", "groups", "name", "start_index=0"]),
        "is_empty_chunk": ("method", ["self", "name=None"]),
        "finish_all_groups": ("method", ["self", "name=None"]),
        "find_next_group": ("method", ["self", "name=None"]),
        "tensor_push": ("method", ["self", "tensor"]),
        "tensor_pop": ("method", ["self", "tensor_tag"]),
        "tensor_need_offloading_checker": ("method", ["self", "tensor"]),
        "bulk_offload_group": ("method", ["self", "group_to_offload"]),
        "get_max_deduplicated_groups": ("method", ["self"]),
        "bulk_reload_group": ("method", ["self"]),
        "pre_reload_last_layer": ("method", ["self"]),
        "should_bulk_offload": ("method", ["self", "group"]),
        "bulk_offload": ("method", ["self", "name", "forced_released_tensors"]),
        "on_group_commit_forward": ("method", ["self", "name", "forced_released_tensors"]),
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
        "forward": ("static", ["ctx", "tensor"]),
        "backward": ("static", ["ctx", "grad_output"]),
    },
    "FineGrainedActivationOffloadingInterface": {
        "__init__": ("method", ["self", "offload", "tensor", "name"]),
        "__enter__": ("method", ["self"]),
        "__exit__": ("method", ["self", "*args"]),
        "cuda_graph_stream": ("static", []),
        "cuda_graph_event": ("static", []),
        "init_chunk_handler": (
            "static",
            [
                "pp_rank",
                "vp_size",
                "vp_stage",
                "min_offloaded_tensor_size",
                "delta_offload_bytes_across_pp_ranks",
                "activation_offload_fraction",
                "max_inflight_offloads=None",
            ],
        ),
        "get_context": ("static", ["flag"]),
        "group_offload": (
            "method",
            ["self", "tensor", "forced_released_tensors=None", "delay_offload=False"],
        ),
        "mark_not_offload": ("static", ["tensor"]),
        "forward_record": ("static", []),
        "backward_record": ("static", ["tensor"]),
        "reset": ("static", [GROUP]),
        "reset_instance": ("static", []),
        "flush_delayed_groups": ("static", []),
        "disable_offload": ("static", []),
        "enable_offload": ("static", []),
        "enter_replay": ("static", []),
        "exit_replay": ("static", []),
    },
}

NOT_HERE: Mapping[str, str] = {
    "ChunkOffloadHandler.BASE_OFFLOAD_MIN_COVERAGE": (
        "how a view leaves, alone or with its storage, depends on what else of it was saved"
    ),
}
"""Names of theirs that are left out, and why."""

INTERFACE = "FineGrainedActivationOffloadingInterface"

DIFFERS: Mapping[str, str] = {
    "debug_rank": "logs, and prints nothing",
    "print_offload_summary_table": "its own call: no `reset()` makes it",
    "fine_grained_offloading_group_start": "no node in the graph; without a chunk an error",
    "fine_grained_offloading_group_offload": (
        "no node in the graph; what others share is not released"
    ),
    "OffloadTensorPool": "freeing twice is an error; freed shapes give their bytes to others",
    "OffloadTensorPool.get_pool_status": (
        "counts and bytes in one dictionary, without `global_stats` and `pools`"
    ),
    "OffloadTensorGroup.set_duplicate_storage_info": (
        "kept for callers: bytes are copied once, so the engine notes none"
    ),
    "PipelineOffloadManager.get_instance": "the manager of `pp_offload`, with these names",
    "PipelineOffloadManager.reset": "no collective; `process_group` is not used",
    "PipelineOffloadManager.post_warmup_callback": "no collective; `process_group` is not used",
    "PipelineOffloadManager.init_model_chunk_offload_handler": (
        "a chunk for each microbatch of each step; options of the plan as above"
    ),
    "PipelineOffloadManager.cpu_tensor_pool": "for callers; ours are in the host tier",
    "PipelineOffloadManager.mark_not_offload": "its storage stays, views too; no flag is set",
    "PipelineOffloadManager.pop_backward_chunk": "returns the chunk",
    "PipelineOffloadManager.push_offload_groups": "what is queued at `reset()` is done there",
    "ChunkOffloadHandler.__init__": "a count in flight as above",
    "ChunkOffloadHandler.reload": "any number of times",
    "ChunkOffloadHandler.tensor_pop": "any number of times",
    "ChunkOffloadHandler.find_next_group": "of the open groups; the first when no name is given",
    "ChunkOffloadHandler.finish_all_groups": "whether backward has reached them; needs no name",
    "FineGrainedOffloadingGroupCommitFunction": "there for who calls it; the engine does not",
    "FineGrainedOffloadingGroupStartFunction": "there for who calls it; the engine does not",
    f"{INTERFACE}.init_chunk_handler": "every parameter has a default, for calls of version 0.16",
    f"{INTERFACE}.group_offload": "what others share is not released; delayed in a replay alone",
    f"{INTERFACE}.mark_not_offload": "its storage stays, views too; no flag is set",
    f"{INTERFACE}.forward_record": "also with an event, as in version 0.16",
    f"{INTERFACE}.reset": "no collective; `process_group` is not used",
    f"{INTERFACE}.cuda_graph_stream": "without CUDA, the live stream",
    f"{INTERFACE}.cuda_graph_event": "without CUDA, an event of the backend",
}
"""By name, where a call that is right there does something else here; elsewhere nothing differs."""

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


def table() -> str:
    """The table of docs/megatron.md: the names of main that differ here, and how."""
    rows = ["| name in main | what differs here |", "|---|---|"]
    listed = [f"{owner}.{name}" if owner else name for owner, name in names()]
    rows += [f"| `{name}` | {DIFFERS[name]} |" for name in listed if name in DIFFERS]
    rows += [f"| `{name}` | not here: {reason} |" for name, reason in NOT_HERE.items()]
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
