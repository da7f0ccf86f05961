"""The names of the reference, as introduced and of Megatron-LM's main, and their signatures.

Both tables were written by hand: the first from the reference's page, the second from main's module
and its call sites, without names that have an underscore. A table is ``owner -> name -> (kind,
parameters)``; the owner of functions is "". Parameters are without ``self``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

Table = dict[str, dict[str, tuple[str, str]]]


def read(text: str, before: Mapping[str, Any] = {}) -> Table:  # noqa: B006
    """A table from its text.

    Args:
        text: Functions, and classes with their methods. A class has the methods that it, or the
            one in brackets, has in ``before``, but for those that are changed or ``gone``.
        before: The table of an earlier version.
    """
    table: Table = {"": {}}
    owner = ""
    for line in re.sub(r",\n +", ", ", text).strip().splitlines():
        if line.endswith(":"):
            owner, _, earlier = line.rstrip("):").partition("(")
            table[owner] = dict(before.get(earlier or owner, {}))
            continue
        kind, name, parameters = re.fullmatch(
            r" *(?:(static|class|property|gone) )?(\w+)(?:\((.*)\))?", line
        ).groups()
        if kind == "gone":
            del table[owner][name]
        else:
            table[owner][name] = kind or ("method" if owner else "static"), parameters or ""
    return table


REFERENCE = read(
    """
debug_rank(message)
print_offload_summary_table(total_offload_bytes)
fine_grained_offloading_disable_offload()
fine_grained_offloading_enable_offload()
fine_grained_offloading_group_commit(tensor, name, forced_released_tensors=None,
    delay_offload=False)
fine_grained_offloading_group_flush_delayed_groups()
fine_grained_offloading_group_start(tensor, name=None)
fine_grained_offloading_forward_record(event)
fine_grained_offloading_backward_record(tensor, event)
GPUTensorPool:
    __init__(device='cuda', pin_memory=False)
    _get_pool_key(shape, dtype)
    static _calculate_memory_size(shape, dtype)
    allocate(shape, dtype=torch.float32)
    free(tensor)
    get_pool_status(shape=None, dtype=None)
    reset()
    clear()
    __del__()
OffloadTensorGroup:
    __init__(name)
    push_tensor(tag, tensor)
    pop_tensor(tag)
    record_offload_event(stream)
    wait_offload_event(stream)
    record_reload_event(stream)
    wait_reload_event(stream)
    update_offload_info(tensor)
PipelineOffloadManager:
    __init__()
    class get_instance()
    class reset_instance()
    property d2h_stream
    property h2d_stream
    property cpu_tensor_pool
    push_offload_groups(group_hook, forced_released_tensors)
    flush_delayed_groups()
    reset()
    property offload_summary_bytes
    property offload_summary_total_bytes
    flush()
    disable_offload()
    enable_offload()
    post_warmup_callback()
    push(handler)
    pop_backward_chunk(name=None)
    front_backward_chunk(name=None)
    init_model_chunk_offload_handler(vp_size, vp_stage, min_offloaded_tensor_size=1048576)
    pop_forward_chunk(name=None)
    cur_forward_chunk()
    cur_backward_chunk()
    mark_not_offloadable(tensor)
    __enter__()
    __exit__(*args)
    on_save_for_backward(tensor)
    on_get_saved_tensor(saved_state)
ChunkOffloadHandler:
    __init__(min_offloaded_tensor_size, cpu_tensor_pool)
    offload(src_tensor, pin_memory=True, use_cpu_pool=True)
    reload(state, non_blocking=None)
    reset()
    find_group_with_name(name, start_index=0)
    is_empty_chunk(name=None)
    finish_all_groups(name=None)
    find_next_group(name=None)
    tensor_push(tensor)
    tensor_pop(tensor_tag)
    tensor_need_offloading_checker(tensor)
    bulk_offload_group()
    get_max_deduplicated_groups()
    bulk_reload_group()
    pre_reload_last_layer()
    should_bulk_offload()
    bulk_offload(forced_released_tensors)
    on_group_commit_forward(forced_released_tensors)
    bulk_reload()
    on_group_commit_backward(name)
    on_group_start_forward(name)
    on_group_start_backward()
FineGrainedOffloadingGroupCommitFunction:
    static forward(ctx, tensor, cur_forward_chunk, name, forced_released_tensors, delay_offload)
    static backward(ctx, *grad_output)
FineGrainedOffloadingGroupStartFunction:
    static forward(ctx, tensor, cpu_offload_handler, name)
    static backward(ctx, grad_output)
FineGrainedOffloadingBackwardRecordFunction:
    static forward(ctx, tensor, event)
    static backward(ctx, grad_output)
FineGrainedActivationOffloadingInterface:
    __init__(offload, tensor, name)
    __enter__()
    __exit__(*args)
    static init_chunk_handler(vp_size, vp_stage, min_offloaded_tensor_size)
    static get_context(flag)
    static group_commit(tensor, name, forced_released_tensors=None, delay_offload=False)
    static mark_not_offloadable(tensor)
    static forward_record(event)
    static reset()
    static reset_instance()
"""
)

MAIN = read(
    """
debug_rank(message)
print_offload_summary_table(total_offload_bytes, local_duplicate_summary=None, process_group=None)
fine_grained_offloading_disable_offload()
fine_grained_offloading_enable_offload()
fine_grained_offloading_group_start(tensor, name=None)
fine_grained_offloading_group_offload(tensor, name, forced_released_tensors=None,
    delay_offload=False)
fine_grained_offloading_group_flush_delayed_groups()
OffloadTensorPool(GPUTensorPool):
    gone _get_pool_key
    gone _calculate_memory_size
    gone __del__
OffloadTensorGroup:
    set_duplicate_storage_info(tensor_count, duplicate_bytes)
PipelineOffloadManager:
    gone mark_not_offloadable
    push_offload_groups(group_hook, name, forced_released_tensors)
    reset(process_group=None)
    post_warmup_callback(process_group=None)
    init_model_chunk_offload_handler(pp_rank, vp_size, vp_stage,
        min_offloaded_tensor_size=1048576, delta_offload_bytes_across_pp_ranks=0,
            activation_offload_fraction=1.0, max_inflight_offloads=None)
    property cuda_graph_stream
    property cuda_graph_event
    mark_not_offload(tensor)
ChunkOffloadHandler:
    __init__(min_offloaded_tensor_size, cpu_tensor_pool, max_inflight_offloads=None)
    find_group_with_name(groups, name, start_index=0)
    bulk_offload_group(group_to_offload)
    should_bulk_offload(group)
    bulk_offload(name, forced_released_tensors)
    on_group_commit_forward(name, forced_released_tensors)
FineGrainedOffloadingGroupCommitFunction:
FineGrainedOffloadingGroupStartFunction:
FineGrainedOffloadingBackwardRecordFunction:
    static forward(ctx, tensor)
FineGrainedActivationOffloadingInterface:
    gone group_commit
    gone mark_not_offloadable
    static init_chunk_handler(pp_rank, vp_size, vp_stage, min_offloaded_tensor_size,
        delta_offload_bytes_across_pp_ranks, activation_offload_fraction,
            max_inflight_offloads=None)
    static forward_record()
    static reset(process_group=None)
    static cuda_graph_stream()
    static cuda_graph_event()
    group_offload(tensor, forced_released_tensors=None, delay_offload=False)
    static mark_not_offload(tensor)
    static backward_record(tensor)
    static flush_delayed_groups()
    static disable_offload()
    static enable_offload()
    static enter_replay()
    static exit_replay()
""",
    REFERENCE,
)

INTERFACE = "FineGrainedActivationOffloadingInterface"
OURS_TAKES_MORE = {
    f"{INTERFACE}.init_chunk_handler",
    f"{INTERFACE}.forward_record",
    "PipelineOffloadManager.init_model_chunk_offload_handler",
}
"""Of main, where our parameters have defaults that theirs have not, or there is one more."""


def signature(owner: Any, name: str) -> tuple[str, str]:
    """Kind and parameters of what is there, without our parameters that are keyword-only."""
    getattr(owner, name)  # a module of ours imports it now
    member = inspect.getattr_static(owner, name)
    kinds = {staticmethod: "static", classmethod: "class", property: "property"}
    kind = kinds.get(type(member), "method" if isinstance(owner, type) else "static")
    function = member.fget if kind == "property" else getattr(owner, name)
    stars, results = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            assert parameter.default is not parameter.empty, f"{parameter} needs a default"
        elif parameter.name != "self":
            has_default = parameter.default is not parameter.empty
            default = f"={parameter.default!r}" if has_default else ""
            results.append(stars.get(parameter.kind.name, "") + parameter.name + default)
    return kind, ", ".join(results)
