"""Checkpoints of single calls and modules: equal options share an engine.

y = checkpoint(layer, x, mask=mask, offload_inputs=True)
block = checkpoint_wrapper(block, offload_inputs=True)
run = checkpoint_function(offload_inputs=True)  # the engine of both
y = run(layer, x, mask=mask)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, cast

from torch.nn import Module

from pp_offload._checkpoint.options import FullACParams, SelectiveOpACParams
from pp_offload._checkpoint.recompute import Recompute, shared_for
from pp_offload._common.checks import brief, check_flag, check_kind
from pp_offload._common.torch_private import CheckpointWrapper
from pp_offload.backends import Backend
from pp_offload.config import OffloadConfig

OP_OPTIONS = {option.name for option in fields(SelectiveOpACParams)} - {
    option.name for option in fields(FullACParams)
}

INSTEAD = {
    "context_fn": "name operators in checkpoint_function(offload_ops_keys=[...])",
    "debug": "call torch.utils.checkpoint.checkpoint to look for the operator that differs",
}
"""Arguments of PyTorch's checkpoint that would reach the function, and what to do instead."""


def checkpoint_function(*, backend: Backend | None = None, **options: Any) -> Recompute:
    """Return a function that runs other functions under a checkpoint with these options.

    The result fits where such a function is expected: ``f(function, *args, **kwargs)`` returns
    the result of ``function``, which runs again in backward.

    Args:
        backend: Device to work on; the accelerator if present, else the CPU. Make a backend once:
            each has an engine of its own, which lives as long as the backend.
        options: Options of :class:`FullACParams`, or of :class:`SelectiveOpACParams` if operators
            are named.

    Returns:
        The same object for equal options and the same backend. It has ``counts`` of its work so
        far, and, if anything is offloaded, ``stash.statistics()``.

    Raises:
        ValueError: An option cannot be right or does not exist; the message names near ones.
        TypeError: ``backend`` is no backend.
    """
    kind = SelectiveOpACParams if OP_OPTIONS & options.keys() else FullACParams
    return shared_for(kind(**options), backend)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = False,
    preserve_rng_state: bool = True,
    determinism_check: str = "default",
    early_stop: bool = True,
    offload_inputs: bool = False,
    min_offload_size: int = 1024,
    config: OffloadConfig | None = None,
    backend: Backend | None = None,
    **kwargs: Any,
) -> Any:
    """Call ``function``, keep only its inputs, and have backward run it again.

    Args:
        function: A module, or any function of tensors. Without grad it is called plainly.
        args, kwargs: Arguments of ``function``. Tensors are found in containers, too.
        use_reentrant, preserve_rng_state, determinism_check, early_stop: PyTorch's options.
        offload_inputs, min_offload_size, config: See :class:`FullACParams`.
        backend: Device to work on; the accelerator if present, else the CPU.

    Returns:
        The result of ``function``.

    Raises:
        ValueError: A value cannot be right, or reentrant checkpoints do not have the option.
        TypeError: ``function`` cannot be called, or ``config`` or ``backend`` is none.

    Source: PyTorch ``torch.utils.checkpoint.checkpoint``.
    """
    if not callable(function):
        raise TypeError(f"function is {brief(function)}, expected a module or another callable")
    for name in INSTEAD.keys() & kwargs.keys():
        raise ValueError(f"checkpoint has no {name}, expected none; {INSTEAD[name]}")
    run = checkpoint_function(
        use_reentrant=use_reentrant,
        preserve_rng_state=preserve_rng_state,
        determinism_check=determinism_check,
        early_stop=early_stop,
        offload_inputs=offload_inputs,
        min_offload_size=min_offload_size,
        config=OffloadConfig() if config is None else config,
        backend=backend,
    )
    return run(function, *args, **kwargs)


class CheckpointedModule(CheckpointWrapper):
    """A module that backward recomputes. :func:`checkpoint_wrapper` makes these."""

    @property
    def recompute(self) -> Recompute:
        """Engine with ``params``, ``counts`` and, with offload, ``stash.statistics()``."""
        return cast(Recompute, cast(Any, self.checkpoint_fn).func)  # the function is a partial

    def extra_repr(self) -> str:
        params = self.recompute.params
        names = [name for name in ("offload_inputs", "use_reentrant") if getattr(params, name)]
        return ", ".join(f"{name}=True" for name in names)


def checkpoint_wrapper(
    module: Module,
    offload_to_cpu: bool = False,
    *,
    backend: Backend | None = None,
    **options: Any,
) -> CheckpointedModule:
    """Have backward recompute ``module``, and offload its inputs if wanted.

    Names in the state dict do not change. Attributes are found through the wrapper, which may be
    copied and, without a ``backend``, pickled.

    Args:
        module: Not changed. Without grad it is called plainly.
        offload_to_cpu: ``offload_inputs`` by fairscale's name.
        backend: Device to work on; the accelerator if present, else the CPU.
        options: Options of :func:`checkpoint_function`.

    Returns:
        The wrapper, to put in the place of ``module``.

    Raises:
        ValueError: ``module`` is wrapped already, or an option cannot be right or does not exist.
        TypeError: ``module`` is no module, or ``backend`` no backend.

    Source: fairscale ``checkpoint_wrapper``; PyTorch ``checkpoint_wrapper``.
    """
    check_kind("module", module, Module, "an nn.Module")
    check_flag("offload_to_cpu", offload_to_cpu)
    if isinstance(module, CheckpointWrapper):
        raise ValueError(
            f"module is a {type(module).__name__}, which is computed again already; expected a "
            "module without: twice costs time and frees nothing"
        )
    if offload_to_cpu:
        options = {"offload_inputs": True, **options}
    recompute = checkpoint_function(backend=backend, **options)
    if recompute.stash is not None:
        recompute.stash.residents.add_module(module)
    return CheckpointedModule(module, checkpoint_fn=recompute)
