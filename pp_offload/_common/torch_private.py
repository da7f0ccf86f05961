"""Every private name of torch that this package uses, and the versions of torch it was seen in.

PyTorch promises nothing about a private name, so a new version may lack one. Here one sees which
ones there are, and an import that fails says all that are missing, and which torch has them. A test
looks each of them up on the torch that is installed; another finds private names used elsewhere.

    from pp_offload._common.torch_private import tree_leaves, use_count

NOTE [ Attributes of objects ]
    ``tensor._version`` and the like are read many times for each saved tensor, and a function
    around each would cost more than the read. So attributes stay where they are used, and
    :data:`ATTRIBUTES` lists them; likewise operators, in :data:`OPERATORS`. All other names are
    used in this file alone.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from traceback import walk_tb
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

F = TypeVar("F", bound=Callable[..., Any])

SEEN = ("2.10.0", "2.13.0", "2.14.1")
"""Releases of torch that have every name below, unless :data:`ONLY_IN` says otherwise. Each was
looked up there, and tests were run on it; ``docs/versions.md`` says which.
"""

FUNCTIONS = (
    "torch._C.DisableTorchFunctionSubclass",
    "torch._C.DispatchKey",
    "torch._C._DisableTorchDispatch",
    "torch._C._SetExcludeDispatchKeyGuard",
    "torch._C._TorchDispatchModeKey",
    "torch._C._accelerator_getDeviceIndex",
    "torch._C._accelerator_getStream",
    "torch._C._accelerator_setDeviceIndex",
    "torch._C._accelerator_setStream",
    "torch._C._are_functorch_transforms_active",
    "torch._C._autograd._get_sequence_nr",
    "torch._C._autograd._pop_saved_tensors_default_hooks",
    "torch._C._autograd._push_saved_tensors_default_hooks",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch._C._current_graph_task_id",
    "torch._C._dispatch_tls_is_dispatch_key_included",
    "torch._C._dynamo.eval_frame._FrameAction",
    "torch._C._dynamo.eval_frame._FrameExecStrategy",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
    "torch._C._get_dispatch_mode",
    "torch._C._is_tracing",
    "torch._C._storage_Use_Count",
    "torch._foreach_copy_",
    "torch._has_compatible_shallow_copy_type",
    "torch._neg_view",
    "torch._ops.OpOverload",
    "torch._ops.OpOverloadPacket",
    "torch.autograd.Variable._execution_engine",
    "torch.autograd.profiler._is_profiler_enabled",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.apply_activation_checkpointing",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper",
    "torch.distributed.pipelining._utils.InferenceMode",
    "torch.distributed.pipelining.schedules._PipelineScheduleRuntime",
    "torch.nn.modules.module._global_forward_pre_hooks",
    "torch.utils._mode_utils.no_dispatch",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._python_dispatch._disable_current_modes",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
    "torch.utils._pytree.tree_flatten",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map",
    "torch.utils._pytree.tree_map_only",
    "torch.utils._pytree.tree_unflatten",
    "torch.utils.checkpoint._recomputation_hook",
)
"""Of modules. The last is only asked about: see NOTE [ Inside a checkpoint ]."""

ONLY_IN = {
    "torch.distributed.pipelining._utils.InferenceMode": "2.13 and later",
    "PipelineStage._inference_mode": "2.13 and later",
}
"""Names that the package does without where they are missing."""

ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    "Tensor": (
        "_backward_hooks",
        "_base",
        "_fix_weakref",
        "_is_zerotensor",
        "_post_accumulate_grad_hooks",
        "_use_count",
        "_version",
    ),
    "UntypedStorage": ("_cdata",),
    "Node": ("_input_metadata", "_sequence_nr", "_set_sequence_nr"),
    "ExpandBackward0": ("_saved_self_sym_sizes",),
    "ExpBackward0": ("_raw_saved_result",),
    "OpOverload": ("_overloadpacket", "_schema"),
    "Library": ("_destroy",),
    "Module": (
        "_apply",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_buffers",
        "_forward_hooks",
        "_forward_pre_hooks",
        "_modules",
        "_non_persistent_buffers_set",
        "_parameters",
    ),
    "PipelineScheduleSingle": ("_n_microbatches", "_stage"),
    "PipelineScheduleMulti": ("_n_microbatches", "_stages"),
    "_PipelineScheduleRuntime": ("_load_csv",),
    "PipelineStage": ("_inference_mode", "_prepare_backward_infra", "_prepare_forward_infra"),
    "CheckpointWrapper": ("_checkpoint_wrapped_module",),
    "FullyShardedDataParallel": ("_fsdp_wrapped_module",),
    "OptimizedModule": ("_orig_mod",),
    "RNNBase": ("_flat_weight_refs", "_flat_weights", "_flat_weights_names"),
}
"""By the class of the object. See NOTE [ Attributes of objects ]."""

OPERATORS = (
    "aten._grouped_mm",
    "aten._scaled_dot_product_attention_math",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_efficient_attention_backward",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_backward",
    "aten._to_copy",
    "aten._unsafe_view",
    "_c10d_functional.reduce_scatter_tensor",
)
"""Of ``torch.ops``."""


def look_up(path: str) -> Any:
    """What is at a path of :data:`FUNCTIONS`.

    Raises:
        AttributeError: Nothing is there.
        ImportError: Nor is the module that it would be in.
    """
    parts = path.split(".")
    for num in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:num]))
        except ImportError:
            continue
        for part in parts[num:]:
            found = getattr(found, part)
        return found
    raise ImportError(f"there is no module of {path}")


def missing() -> Iterator[str]:
    """Those of :data:`FUNCTIONS` and :data:`OPERATORS` that the package needs, and torch lacks."""
    paths = [path for path in FUNCTIONS if path not in ONLY_IN]
    for path in (*paths, *(f"torch.ops.{name}" for name in OPERATORS)):
        try:
            look_up(path)
        except (AttributeError, ImportError):
            yield path


def complaint(failure: Exception) -> str:
    """What to say where an import of a private name fails."""
    names = ", ".join(missing()) or str(failure)
    return (
        f"torch {torch.__version__} lacks {names}, which pp_offload needs; expected torch 2.10 or "
        f"later (all is there in {', '.join(SEEN)}): install such a torch, or, if this one is "
        "newer, a newer pp_offload"
    )


try:
    from torch._C import DisableTorchFunctionSubclass, DispatchKey
    from torch._ops import OpOverload, OpOverloadPacket
    from torch.autograd import Variable
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        ActivationWrapper,
        CheckpointWrapper,
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )
    from torch.utils._mode_utils import no_dispatch
    from torch.utils._python_dispatch import (
        TorchDispatchMode,
        is_traceable_wrapper_subclass,
    )
    from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
    from torch.utils._pytree import (
        tree_flatten,
        tree_leaves,
        tree_map,
        tree_map_only,
        tree_unflatten,
    )

    DisableTorchDispatch = torch._C._DisableTorchDispatch
    SetExcludeDispatchKeyGuard = torch._C._SetExcludeDispatchKeyGuard
    foreach_copy_ = torch._foreach_copy_
    has_compatible_shallow_copy_type = torch._has_compatible_shallow_copy_type
    neg_view: Callable[[Tensor], Tensor] = torch._neg_view

    forward_pre_hooks: dict[int, Callable[..., Any]]
    forward_pre_hooks = torch.nn.modules.module._global_forward_pre_hooks
    """Of all modules; in order."""

    # Those of ``torch.accelerator`` without its Python code, for each saved tensor asks.
    accelerator_device: Callable[[], int] = torch._C._accelerator_getDeviceIndex
    accelerator_stats: Callable[[int], dict[str, Any]] = torch._C._accelerator_getDeviceStats
    """Of its allocator, nested; ``torch.accelerator.memory_stats`` takes seven times as long."""

    accelerator_stream: Callable[[int], torch.Stream] = torch._C._accelerator_getStream
    set_accelerator_device: Callable[[int], None] = torch._C._accelerator_setDeviceIndex
    set_accelerator_stream: Callable[[Any], None] = torch._C._accelerator_setStream

    pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
    push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
    top_hooks: Callable[[bool], tuple[Callable[..., Any], Any] | None]
    top_hooks = torch._C._autograd._top_saved_tensors_default_hooks

    sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
    """One more than that of the node made last on this thread."""

    NODES: dict[str, type] = {
        name: kind for name, kind in vars(torch._C._functions).items() if isinstance(kind, type)
    }
    """The types of the nodes that torch makes for its own operators, by name."""

    graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
    """The number of the backward that runs on this thread; -1 outside."""

    queue_callback = Variable._execution_engine.queue_callback
    """Calls a function when the running backward has ended."""

    use_count: Callable[[int], int] = torch._C._storage_Use_Count
    """How many tensors and Python objects hold the storage of this key, its ``_cdata``."""

    is_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
    """Whether operators that run now stand for others, as in the transforms of ``torch.func``."""

    _compiler = torch._C._dynamo.eval_frame  # in C++: its Python takes seconds to import
    _set_strategy = _compiler.set_code_exec_strategy
    _SKIP = _compiler._FrameExecStrategy(_compiler._FrameAction.SKIP, _compiler._FrameAction.SKIP)

    _mode = torch._C._get_dispatch_mode
    _is_included = torch._C._dispatch_tls_is_dispatch_key_included
    _is_tracing = torch._C._is_tracing
    _RECORDS = torch._C._TorchDispatchModeKey.PROXY
except (AttributeError, ImportError) as failure:
    raise ImportError(complaint(failure)) from failure


def never_compiled(function: F) -> F:
    """The function itself, which runs as it is, and all that it calls, whatever is compiled around.

    As ``torch.compiler.disable``, without a wrapper that each call would go through.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # where a graph has a call
    _set_strategy(function.__code__, _SKIP)  # type: ignore[attr-defined]  # and where it is called
    return function


def is_profiling() -> bool:
    """Whether ``torch.profiler`` runs now."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def records_operators() -> bool:
    """Whether operators that run now become part of a graph, as by ``make_fx`` or TorchScript."""
    # All in C, for each group asks it.
    if _mode(_RECORDS) is not None or _is_included(DispatchKey.PreDispatch):
        return True
    return _is_tracing()


_CHECKPOINT = inspect.unwrap(checkpoint).__code__


def end_checkpoints(failure: BaseException | None) -> None:
    """End the checkpoints whose forward raised ``failure``, innermost first.

    Torch 2.13 does so itself. Before, a checkpoint leaves its hooks on the stack, and its generator
    pops the top of the stack when the traceback is freed, which may be the hooks of another.
    """
    trace = None if failure is None else failure.__traceback__
    frames = [frame for frame, _ in walk_tb(trace) if frame.f_code is _CHECKPOINT]
    for frame in reversed(frames):
        if (generator := frame.f_locals.get("gen")) is not None:  # a reentrant one has none
            generator.close()


def schedule_of_csv(path: str, stages: list[Any], num_microbatches: int, loss_fn: Any) -> Any:
    """A schedule whose actions a CSV file has, a line for each rank.

    Raises:
        AssertionError: It does not fit the stages.
        RuntimeError: A line is no list of actions.
    """
    # Here, for this module of torch imports its compiler.
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    made = _PipelineScheduleRuntime(stages, num_microbatches, loss_fn=loss_fn)
    made._load_csv(path)
    return made


def knows_sizes(stage: Any) -> bool:
    """Have a stage that was given samples take their sizes; whether there was a need to say so.

    Torch 2.10 needs not be told.
    """
    from torch.distributed.pipelining import _utils

    modes = getattr(_utils, "InferenceMode", None)
    if modes is None:
        return False
    stage._inference_mode = modes.STATIC
    return True


def prepare_stage(stage: Any, num_microbatches: int) -> None:
    """What a schedule does to its stages in a first step, where all sizes are known.

    Args:
        stage: A ``PipelineStage`` that was given samples of its inputs and outputs.
        num_microbatches: Of a step.
    """
    stage.has_backward = True
    if knows_sizes(stage):
        stage._prepare_forward_infra(num_microbatches, None, has_backward=True)
    else:
        stage._prepare_forward_infra(num_microbatches, ())
    stage._prepare_backward_infra(num_microbatches)


__all__ = [
    "NODES",
    "ActivationWrapper",
    "CheckpointWrapper",
    "DisableTorchDispatch",
    "DisableTorchFunctionSubclass",
    "DispatchKey",
    "OpOverload",
    "OpOverloadPacket",
    "SetExcludeDispatchKeyGuard",
    "TorchDispatchMode",
    "accelerator_device",
    "accelerator_stats",
    "accelerator_stream",
    "apply_activation_checkpointing",
    "checkpoint_wrapper",
    "disable_current_modes",
    "end_checkpoints",
    "foreach_copy_",
    "forward_pre_hooks",
    "graph_task_id",
    "has_compatible_shallow_copy_type",
    "is_profiling",
    "is_traceable_wrapper_subclass",
    "is_transformed",
    "knows_sizes",
    "neg_view",
    "never_compiled",
    "no_dispatch",
    "pop_hooks",
    "prepare_stage",
    "push_hooks",
    "queue_callback",
    "records_operators",
    "schedule_of_csv",
    "sequence_number",
    "set_accelerator_device",
    "set_accelerator_stream",
    "top_hooks",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "use_count",
]
