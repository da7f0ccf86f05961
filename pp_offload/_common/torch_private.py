"""Private names of torch that this package uses. Everything else imports them from here.

    from pp_offload._common.torch_private import tree_leaves, use_count

PyTorch promises nothing about a private name. If the installed torch lacks one, the import of this
module fails and names it. A test finds private names that are used elsewhere.

NOTE [ Attributes of objects ]
    Private attributes such as ``tensor._version`` are read many times per saved tensor, so modules
    read them directly. The test of this module lists them, with private operators.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from traceback import walk_tb
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import Store
from torch.utils.checkpoint import checkpoint

F = TypeVar("F", bound=Callable[..., Any])

# Releases of torch with every name below; ``docs/versions.md`` lists the tests run there.
SEEN = ("2.10.0", "2.11.0", "2.13.0", "2.14.1")

try:
    from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
    from torch._C import DispatchKey as DispatchKey
    from torch._ops import OpOverload as OpOverload
    from torch.amp import grad_scaler as _grad_scaler
    from torch.autograd import Variable
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as _wrappers
    from torch.utils import _python_dispatch, _pytree
    from torch.utils._mode_utils import no_dispatch as no_dispatch
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

    disable_current_modes = _python_dispatch._disable_current_modes
    is_traceable_wrapper_subclass = _python_dispatch.is_traceable_wrapper_subclass

    # Copies of a tensor of a ``GradScaler`` on the devices of gradients.
    ScaleCopies: Any = _grad_scaler._MultiDeviceReplicator

    ActivationWrapper = _wrappers.ActivationWrapper
    CheckpointWrapper = _wrappers.CheckpointWrapper
    apply_activation_checkpointing = _wrappers.apply_activation_checkpointing
    checkpoint_wrapper = _wrappers.checkpoint_wrapper

    tree_flatten = _pytree.tree_flatten
    tree_leaves = _pytree.tree_leaves
    tree_map_only = _pytree.tree_map_only
    tree_unflatten = _pytree.tree_unflatten

    DisableTorchDispatch = torch._C._DisableTorchDispatch
    SetExcludeDispatchKeyGuard = torch._C._SetExcludeDispatchKeyGuard
    assert_async: Callable[[Tensor, str], None] = torch._assert_async
    foreach_copy_ = torch._foreach_copy_
    fused_rms_norm: Callable[..., tuple[Tensor, Tensor]] = torch._fused_rms_norm
    has_compatible_shallow_copy_type = torch._has_compatible_shallow_copy_type
    neg_view: Callable[[Tensor], Tensor] = torch._neg_view

    # Forward pre-hooks of all modules, in order.
    forward_pre_hooks: dict[int, Callable[..., Any]]
    forward_pre_hooks = torch.nn.modules.module._global_forward_pre_hooks

    # Functions behind ``torch.accelerator``, without its Python: each saved tensor needs these.
    # ``torch.accelerator.memory_stats`` takes seven times as long as the nested statistics.
    accelerator_device: Callable[[], int] = torch._C._accelerator_getDeviceIndex
    accelerator_stats: Callable[[int], dict[str, Any]] = torch._C._accelerator_getDeviceStats
    accelerator_stream: Callable[[int], torch.Stream] = torch._C._accelerator_getStream
    set_accelerator_device: Callable[[int], None] = torch._C._accelerator_setDeviceIndex
    set_accelerator_stream: Callable[[Any], None] = torch._C._accelerator_setStream

    pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
    push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
    set_versions = torch._C._autograd._unsafe_set_version_counter
    top_hooks: Callable[[bool], tuple[Callable[..., Any], Any] | None]
    top_hooks = torch._C._autograd._top_saved_tensors_default_hooks

    # Types of the autograd nodes of torch's own operators, by name.
    NODES: dict[str, type] = {
        name: kind for name, kind in vars(torch._C._functions).items() if isinstance(kind, type)
    }
    # One more than the number of the newest autograd node of this thread.
    sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
    # Number of the backward that runs on this thread; -1 outside a backward.
    graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
    # Calls a function when the running backward has ended.
    queue_callback = Variable._execution_engine.queue_callback
    # Number of tensors and Python objects that hold a storage, by its ``_cdata``.
    use_count: Callable[[int], int] = torch._C._storage_Use_Count
    # True while a transform of ``torch.func`` is active, so operators stand for others.
    is_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
    # True while ``torch.autocast`` is active on this thread for any device.
    is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled

    _compiler = torch._C._dynamo.eval_frame  # in C++: its Python takes seconds to import
    _set_strategy = _compiler.set_code_exec_strategy
    _SKIP = _compiler._FrameExecStrategy(_compiler._FrameAction.SKIP, _compiler._FrameAction.SKIP)

    _mode = torch._C._get_dispatch_mode
    _is_included = torch._C._dispatch_tls_is_dispatch_key_included
    _is_tracing = torch._C._is_tracing
    _RECORDS = torch._C._TorchDispatchModeKey.PROXY
except (AttributeError, ImportError) as failure:
    raise ImportError(
        f"torch {torch.__version__} lacks a private name that pp_offload needs ({failure}); "
        f"expected torch 2.10 or later (tested with {', '.join(SEEN)}): install such a torch, or, "
        "if this one is newer, a newer pp_offload"
    ) from failure


def never_compiled(function: F) -> F:
    """Mark a function so that it, and all that it calls, runs uncompiled; return it. Unlike
    ``torch.compiler.disable``, this adds no wrapper that each call would go through.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # for a call inside a graph
    _set_strategy(function.__code__, _SKIP)  # type: ignore[attr-defined]  # and for a direct call
    return function


def is_profiling() -> bool:
    """Whether ``torch.profiler`` runs now."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def records_operators() -> bool:
    """Whether operators that run now join a graph, as by ``make_fx`` or TorchScript."""
    # All in C, because every group calls this.
    if _mode(_RECORDS) is not None or _is_included(DispatchKey.PreDispatch):
        return True
    return _is_tracing()


def is_in_autocast() -> bool:
    """Whether a region of autocast is open, also while an operator runs, which is outside of it."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting() > 0


def has_modes_of_others() -> bool:
    """Whether a dispatch mode of others, which may change results, is active."""
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    others = [mode for mode in modes if not type(mode).__module__.startswith("pp_offload.")]
    return not all(getattr(mode, "only_observes", False) for mode in others)


_CHECKPOINT = inspect.unwrap(checkpoint).__code__


def end_checkpoints(failure: BaseException | None) -> None:
    """End the checkpoints whose forward raised ``failure``, innermost first. Torch 2.13 ends them
    itself. An older checkpoint leaves its hooks on the stack until the traceback is freed; its
    generator then pops the top, which may hold another's hooks.
    """
    trace = None if failure is None else failure.__traceback__
    frames = [frame for frame, _ in walk_tb(trace) if frame.f_code is _CHECKPOINT]
    for frame in reversed(frames):
        if (generator := frame.f_locals.get("gen")) is not None:  # a reentrant one has none
            generator.close()


def schedule_of_csv(path: str, stages: list[Any], num_microbatches: int, loss_fn: Any) -> Any:
    """Make a schedule from a CSV file of actions, a line for each rank. Raise an AssertionError if
    they do not fit the stages, and a RuntimeError if a line is no list of actions.
    """
    # Imported late, because this module of torch imports its compiler.
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    schedule = _PipelineScheduleRuntime(stages, num_microbatches, loss_fn=loss_fn)
    schedule._load_csv(path)
    return schedule


def knows_sizes(stage: Any) -> bool:
    """Have a stage read the sizes of its samples; False for torch 2.10, where it does so itself."""
    from torch.distributed.pipelining import _utils

    modes = getattr(_utils, "InferenceMode", None)
    if modes is None:
        return False
    stage._inference_mode = modes.STATIC
    return True


def default_store() -> Store:
    """Return the store at which the ranks of the default process group have met."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def prepare_stage(stage: Any, num_microbatches: int) -> None:
    """Prepare a ``PipelineStage`` with samples, which tell all sizes, as its first step does."""
    stage.has_backward = True
    if knows_sizes(stage):
        stage._prepare_forward_infra(num_microbatches, None, has_backward=True)
    else:
        stage._prepare_forward_infra(num_microbatches, ())
    stage._prepare_backward_infra(num_microbatches)
