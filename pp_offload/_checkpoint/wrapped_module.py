"""One module under a checkpoint, as a module of its own.

block = checkpoint_wrapper(block, offload_inputs=True)
y = block(x, mask=mask)

It is a ``CheckpointWrapper`` of PyTorch, which FSDP and others know, and whose state dict has the
names of the module inside. All that were wrapped with equal options share one engine.
"""

from __future__ import annotations

from typing import Any, cast

from torch.nn import Module

from pp_offload._checkpoint.shared import SharedRecompute, checkpoint_function
from pp_offload._common.checks import check_flag, check_kind
from pp_offload._common.torch_private import CheckpointWrapper
from pp_offload.backends import Backend


class CheckpointedModule(CheckpointWrapper):
    """A module that backward computes again. :func:`checkpoint_wrapper` makes these."""

    @property
    def recompute(self) -> SharedRecompute:
        """What runs it: it has ``params``, ``counts`` and, with offload, ``stash.statistics()``."""
        return cast(SharedRecompute, cast(Any, self.checkpoint_fn).func)  # of a partial

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
    """Have backward compute ``module`` again, and its inputs leave the device if so wanted.

    Names in the state dict do not change. Attributes are found through the wrapper, it may be
    copied and, without a ``backend``, pickled.

    Args:
        module: Not changed. Without grad it is only called.
        offload_to_cpu: ``offload_inputs`` by fairscale's name.
        backend: Device to work on; the accelerator where there is one, else the CPU.
        options: Those of :class:`FullACParams`, above all ``offload_inputs``; or of
            :class:`SelectiveOpACParams` where operators are named.

    Returns:
        The wrapper, which goes in the place of ``module``.

    Raises:
        ValueError: ``module`` is wrapped already, a value cannot be right, or an option does not
            exist; the message names near ones.
        TypeError: ``module`` is no module, or ``backend`` no backend.

    Source: fairscale ``checkpoint_wrapper``; PyTorch ``checkpoint_wrapper``.
    """
    check_kind("module", module, Module, "an nn.Module")
    check_flag("offload_to_cpu", offload_to_cpu)
    if isinstance(module, CheckpointWrapper):
        raise ValueError(
            f"module is a {type(module).__name__}, which is computed again already; expected a "
            "module without, for twice would cost time and free nothing"
        )
    if offload_to_cpu:
        options = {"offload_inputs": True, **options}
    recompute = checkpoint_function(backend=backend, **options)
    if recompute.stash is not None:
        recompute.stash.keep_module(module)
    return CheckpointedModule(module, checkpoint_fn=recompute)
