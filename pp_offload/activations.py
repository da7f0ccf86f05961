"""Offload of all activations of a model on one device, without groups to mark.

    with OffloadActivations():
        loss = model(x).mean()
    loss.backward()

What autograd saves inside joins a stash on the device; a stash that is full goes to the host as a
group, and comes back, in reverse order, ahead of its backward. The last stash of a forward stays,
for its backward comes next; if another forward begins instead, it goes as well. Each entering is a
microbatch of its own, so any number may be in flight.

A decoder's output head is best left out: what it saves is large, and needed at once. See
:func:`pp_offload.heads.get_lora_act_offloading_ctx_manager`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ContextDecorator
from dataclasses import replace

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from pp_offload.backends import Backend
from pp_offload.config import OffloadConfig
from pp_offload.left_out import forget_left_out, is_left_out
from pp_offload.saved import Packed, Resident, unpack
from pp_offload.stash import ActivationStash
from pp_offload.statistics import OffloadStatistics


class OffloadActivations(saved_tensors_hooks, ContextDecorator):
    """Offload what autograd saves inside.

    Args:
        use_pin_memory: Put it in pinned memory, which copies need to run beside compute.
        use_streams: Let them; otherwise compute waits for every copy, and none is made ahead,
            whatever ``config`` says.
        min_offload_size: Smaller tensors stay on the device. In bytes.
        max_fwd_stash_size: How many tensors may be on the device before they leave together.
        config: Which tiers, and how much of them. What it says of groups does not count.
        backend: Device to work on; the accelerator where there is one, else the CPU.

    Raises:
        ValueError: ``max_fwd_stash_size`` is below 1, or ``min_offload_size`` below 0.

    Source: torchtune and TRL ``OffloadActivations``.
    """

    def __init__(
        self,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        min_offload_size: int = 1024,
        max_fwd_stash_size: int = 5,
        *,
        config: OffloadConfig | None = None,
        backend: Backend | None = None,
    ) -> None:
        if max_fwd_stash_size < 1 or min_offload_size < 0:
            raise ValueError(
                f"max_fwd_stash_size is {max_fwd_stash_size} and min_offload_size "
                f"{min_offload_size}; expected at least 1 tensor, and at least 0 bytes"
            )
        config = config or OffloadConfig()
        if not use_streams:
            config = replace(config, max_in_flight_bytes=0, prefetch_bytes=0)
        self.stash = ActivationStash(
            "activations",
            config,
            min_offload_size=min_offload_size,
            max_tensors=max_fwd_stash_size,
            use_pin_memory=use_pin_memory,
            backend=backend,
        )
        self._knows_model = False
        self._watches: list[RemovableHandle] = []
        super().__init__(_unless_left_out(self.stash.pack), unpack)

    def __enter__(self) -> OffloadActivations:  # type: ignore[override]
        """Begin the forward of a microbatch."""
        forget_left_out()
        self.stash.begin()
        if not self._knows_model:
            self._watches.append(register_module_forward_pre_hook(self._keep_buffers))
        super().__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        """The forward is over."""
        super().__exit__(*args)
        if self._watches:
            self._watches.pop().remove()

    def keep_module(self, model: Module) -> None:
        """Leave parameters and buffers where they are, whichever view of them is saved.

        Without it buffers are found when a forward comes by their module, which takes some time.
        """
        self._knows_model = True
        self.stash.keep_module(model)

    def update_model_params(self, model: Module) -> None:
        """:meth:`keep_module`, as TRL names it."""
        self.keep_module(model)

    def statistics(self) -> OffloadStatistics:
        """What was moved and what is in use, exact at the call."""
        return self.stash.statistics()

    def _keep_buffers(self, module: Module, _: object) -> None:
        """Batch norm changes its own without a trace, so they must not be under way."""
        for buffer in module._buffers.values():
            if buffer is not None:
                self.stash.keep(buffer)


def _unless_left_out(pack: Callable[[Tensor], Packed]) -> Callable[[Tensor], Packed]:
    def hook(tensor: Tensor) -> Packed:
        return Resident(tensor) if is_left_out() else pack(tensor)

    return hook


class NoOpManager(saved_tensors_hooks, ContextDecorator):
    """What autograd saves inside stays on the device, also inside :class:`OffloadActivations`.

    And inside a checkpoint, which then keeps it. For a module that may be in one, there is
    :func:`pp_offload.left_out.leave_out`.
    """

    def __init__(self) -> None:
        super().__init__(Resident, unpack)
