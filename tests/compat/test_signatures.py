"""The names of the reference, as introduced and of Megatron-LM's main, and their signatures.

Both tables were written by hand: the first from the reference's page, the second from main's module
and its call sites, without names that have an underscore. A table is ``owner -> name -> (kind,
parameters)``; the owner of functions is "". Parameters are without ``self``.
"""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.docs import PAGES
from helpers.ranks import WORKERS, run_ranks

import pp_offload
from pp_offload import CpuBackend, fine_grained_activation_offload, use_backend
from pp_offload._core.cheap_operators import IDENTITIES
from pp_offload.compat import megatron

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


# Our names

MODULES = {pp_offload: REFERENCE, fine_grained_activation_offload: REFERENCE, megatron: MAIN}
TABLE = "print_offload_summary_table"
"""The same function in both modules, with main's parameters."""

OURS: Table = {**REFERENCE, "": {**REFERENCE[""], TABLE: MAIN[""][TABLE]}}
FORMS = [(pp_offload, OURS), (megatron, MAIN)]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_a_module_lists_its_names(module: Any) -> None:
    table = MODULES[module]
    names = {*table[""], *table, "DEBUG", "DEBUG_RANK"} - {""}
    assert names <= set(module.__all__)
    assert (module.DEBUG, module.DEBUG_RANK) == (False, 0)
    if module is megatron:
        assert names == set(module.__all__)
    else:
        assert all(getattr(module, name) is getattr(pp_offload, name) for name in names)
    functions = [name for name in table if name.endswith("Function")]
    assert all(issubclass(getattr(module, name), torch.autograd.Function) for name in functions)


def is_ours(owner: Any, name: str) -> bool:
    """Whether one of our classes defines it: torch's and Python's have such names, too."""
    classes = getattr(owner, "__mro__", [owner])
    ours = [cls for cls in classes if cls.__dict__.get("__module__", "").startswith("pp_offload")]
    return owner in (pp_offload, megatron) or any(name in vars(cls) for cls in ours)


@pytest.mark.parametrize(
    ("module", "table", "owner"),
    [(module, table, owner) for module, table in FORMS for owner in table],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_kind_and_parameters_are_theirs(module: Any, table: Table, owner: str) -> None:
    place = getattr(module, owner) if owner else module
    for name, expected in table[owner].items():
        assert is_ours(place, name), f"{name} is torch's or Python's, or missing"
        got = signature(place, name)
        if module is megatron and f"{owner}.{name}" in OURS_TAKES_MORE:
            ours, theirs = got[1].split(", "), expected[1].split(", ")
            bare = [[text.partition("=")[0] for text in texts] for texts in (ours, theirs)]
            assert got[0] == expected[0] and all("=" in text for text in ours)
            assert bare[0][: len(bare[1])] == bare[1] or not expected[1]
        else:
            assert got == expected, name


def test_the_documentation_names_what_there_is() -> None:
    texts = re.findall(r"^- (.*(?:\n  .*)*)", PAGES["megatron"].split("## Names")[1], re.M)
    parts = [text.partition(": ") for text in texts]
    rows = [(name, what) for names, _, what in parts for name in re.findall("`(.+?)`", names)]
    listed = {f"{owner}.{name}".strip(".") for owner in MAIN for name in MAIN[owner]} | {*MAIN}
    assert rows and OURS_TAKES_MORE <= listed
    assert ".. automodule:: pp_offload.compat.megatron\n   :members:" in PAGES["api"]
    for name, what in rows:
        assert (name in listed) is not what.startswith("not here"), name


def test_the_documented_line_puts_it_in_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Megatron is imported, which need not be installed for this."""
    (code,) = re.findall(r"```python\n(.*?sys\.modules.*?)```", PAGES["megatron"], re.DOTALL)
    code += (
        "from megatron.core.pipeline_parallel.fine_grained_activation_offload import (\n"
        "    FineGrainedActivationOffloadingInterface as off_interface,\n"
        ")\n"
        "import pp_offload.compat.megatron as ours\n"
        "assert off_interface is ours.FineGrainedActivationOffloadingInterface\n"
    )
    monkeypatch.setitem(sys.modules, megatron.THEIRS, None)
    exec(code, {})


def test_one_manager_has_two_faces() -> None:
    """Each makes chunks and groups with its own names."""
    with use_backend(CpuBackend()) as manager:
        face = megatron.PipelineOffloadManager.get_instance()
        assert face is megatron.PipelineOffloadManager.get_instance()
        assert pp_offload.PipelineOffloadManager.get_instance() is manager
        face.disable_offload()
        assert not manager.offloader.engine.is_enabled
        face.enable_offload()
        manager.configure(pp_offload.OffloadConfig(prefetch_bytes=4096))
        for name in ("config", "offloader", "backend"):
            assert getattr(face, name) is getattr(manager, name)
        face.init_model_chunk_offload_handler(0, 1, 0, 1)
        chunk = manager.cur_forward_chunk()
        assert type(chunk) is megatron.ChunkOffloadHandler
        assert type(chunk.on_group_start_forward("mlp")) is megatron.OffloadTensorGroup
        manager.init_model_chunk_offload_handler(None, None, 1)
        chunk = manager.cur_forward_chunk()
        assert type(chunk) is pp_offload.ChunkOffloadHandler
    assert face.backend is pp_offload.PipelineOffloadManager.get_instance().backend, "of now"


# Megatron-Core, as the index has it, trains its GPT model with ours in the place of its module


GROUPS = {"attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"}
NO_PIPELINING = "forward_backward_no_pipelining"
ONE_F_ONE_B = "forward_backward_pipelining_without_interleaving"
INTERLEAVED = "forward_backward_pipelining_with_interleaving"


@pytest.fixture
def megatron_core() -> None:
    """It takes seconds to import."""
    pytest.importorskip("megatron.core", exc_type=ImportError)


@pytest.mark.slow
@pytest.mark.usefixtures("megatron_core")
@pytest.mark.parametrize(
    ("world", "expected"),
    [
        (1, {"serial": NO_PIPELINING, "serial:recompute": NO_PIPELINING}),
        (2, {"1f1b": ONE_F_ONE_B, "interleaved": INTERLEAVED}),
    ],
)
def test_its_own_schedules(world: int, expected: dict[str, str], tmp_path: Path) -> None:
    worker = WORKERS / "megatron_worker.py"
    for results in run_ranks(world, list(expected), tmp_path, worker):
        assert {case: facts["schedule"] for case, facts in results.items()} == expected
        for facts in results.values():
            assert facts["is_ours"] and facts["equal"]
            assert facts["tensors"] > 50
            assert facts["reloaded"] > 0 and facts["offloaded"] > 0
            assert set(facts["groups"]) == GROUPS
            assert facts["live"] == facts["in_use"] == 0


@pytest.mark.slow
@pytest.mark.usefixtures("megatron_core")
def test_recipes_look_behind_functions_that_are_there() -> None:
    for path in IDENTITIES:
        module, _, name = path.rpartition(".")
        assert issubclass(getattr(import_module(module), name), torch.autograd.Function)


@pytest.mark.slow
@pytest.mark.usefixtures("megatron_core")
def test_its_module_has_the_names_as_they_were_introduced() -> None:
    """Version 0.16; what the table says of the reference is what is there."""
    if not version("megatron-core").startswith("0.16."):
        pytest.skip("a later version has the names of main")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = import_module(megatron.THEIRS)
    for owner, methods in REFERENCE.items():
        place = getattr(theirs, owner) if owner else theirs
        for name, expected in methods.items():
            assert signature(place, name) == expected, f"{owner}.{name}"
