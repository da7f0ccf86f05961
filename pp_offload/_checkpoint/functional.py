"""A checkpoint around one call, with inputs that may leave the device.

y = checkpoint(layer, x, mask=mask, offload_inputs=True)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pp_offload._checkpoint.shared import checkpoint_function
from pp_offload._common.checks import said
from pp_offload.backends import Backend
from pp_offload.config import OffloadConfig

INSTEAD = {
    "context_fn": "name operators in checkpoint_function(offload_ops_keys=[...])",
    "debug": "call torch.utils.checkpoint.checkpoint to look for the operator that differs",
}
"""Arguments of PyTorch's that would reach the function, and what to do."""


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
    """Call ``function``, keep its inputs only, and have backward run it again.

    Calls with equal options share one engine, which stays for the process:
    ``checkpoint_function(offload_inputs=True).stash.statistics()`` says what it moved.

    Args:
        function: A module, or any function of tensors. Without grad it is only called.
        args, kwargs: For ``function``. Tensors are found wherever they stand, in containers too.
        use_reentrant, preserve_rng_state, determinism_check, early_stop: PyTorch's; see
            :class:`FullACParams`.
        offload_inputs: Tensors among the arguments go to the tiers until backward. Parameters stay.
        min_offload_size: Smaller tensors stay on the device. In bytes.
        config: Which tiers, and how much of them. Options about groups have no effect.
        backend: Device to work on; the accelerator where there is one, else the CPU.

    Returns:
        What ``function`` returns.

    Raises:
        ValueError: A value cannot be right, or reentrant checkpoints do not have the option.
        TypeError: ``function`` cannot be called, ``config`` is no :class:`OffloadConfig`, or
            ``backend`` no backend.

    Source: PyTorch ``torch.utils.checkpoint.checkpoint``.
    """
    if not callable(function):
        raise TypeError(f"function is {said(function)}, expected a module or another callable")
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
