"""Makes PyTorch's ``GradScaler`` right where gradients are on the host.

For gradients on another device a GradScaler copies its scale, and a flag for infinite gradients,
with ``non_blocking=True``; so do fused optimizers. Such a copy to the host is not over when the
next operator reads it, and gradients would be divided by what that memory held before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pp_offload._common.torch_private import ScaleCopies

_get_at_once = ScaleCopies.get


def wait_for_scales() -> None:
    """Have scales arrive on the host before they are read. Further calls do nothing."""
    if ScaleCopies.get is _get_at_once:
        ScaleCopies.get = _get
        register_optimizer_step_pre_hook(_scales_to_host)


def _get(copies: Any, device: torch.device) -> Tensor:
    if device.type == "cpu" and device not in copies._per_device_tensors:
        copies._per_device_tensors[device] = copies.master.to(device, copy=True)  # waits
    return _get_at_once(copies, device)


def _scales_to_host(optimizer: Any, args: object, kwargs: object) -> None:
    """Copy what a GradScaler gives to a fused optimizer, if some of its parameters are on the host.

    With gradients on two devices PyTorch adds their flags, and fused kernels compare with 1.
    """
    infinite, scale = (getattr(optimizer, name, None) for name in ("found_inf", "grad_scale"))
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    if infinite is None or not any(parameter.is_cpu for parameter in parameters):
        return
    optimizer.found_inf = infinite.cpu().clamp(max=1)
    optimizer.grad_scale = None if scale is None else scale.cpu()
