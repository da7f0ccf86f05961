"""Moves parameters to the host for good; they stay the same objects, with hooks and attributes.

NOTE [ Loss scale ]
    For gradients on another device PyTorch's ``GradScaler`` copies its scale, and a flag for
    infinite gradients, with ``non_blocking=True``; so do fused optimizers. Such a copy to the host
    is not over when the next operator reads it, and gradients would be divided by what that memory
    held before. So the host waits for these copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pp_offload._common.torch_private import ScaleCopies, has_compatible_shallow_copy_type
from pp_offload._slices.plain_copies import PlainCopies
from pp_offload._slices.slices import HOST


def move_to_host(slices: Iterable[Iterable[Parameter]], copies: PlainCopies) -> None:
    """Move parameters to host memory from which the device can copy beside compute.

    The parameters of a slice share an allocation.
    """
    if not copies.backend.is_host:
        wait_for_scales()
    placed: set[int] = set()
    for parameters in slices:
        new = [parameter for parameter in parameters if id(parameter) not in placed]
        placed.update(map(id, new))
        for parameter, on_host in zip(new, _on_host(new, copies), strict=True):
            move(parameter, on_host)


def _on_host(parameters: Sequence[Parameter], copies: PlainCopies) -> Sequence[Tensor]:
    if copies.backend.is_host or not parameters:
        return [parameter.detach().to(HOST) for parameter in parameters]
    host = copies.host_tensors(parameters)
    for copy, parameter in zip(host, parameters, strict=True):
        copy.copy_(parameter.detach())
    return host


def move_buffers(model: Module, device: torch.device) -> None:
    """Move all buffers; a buffer registered twice remains one object."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))


def move(parameter: Parameter, target: Tensor) -> None:
    """Move a parameter, and its gradient, to the memory of ``target``, on any device.

    Raises:
        ValueError: PyTorch refuses, because something else refers to the parameter.
    """
    gradient, parameter.grad = parameter.grad, None
    try:
        # .data exchanges memory between PyTorch's own devices, but not with a plug-in's device.
        if has_compatible_shallow_copy_type(parameter, target):
            parameter.data = target
        else:
            _exchange(parameter, target)
    finally:
        if gradient is not None:
            parameter.grad = gradient.to(parameter.device)


def _exchange(parameter: Parameter, target: Tensor) -> None:
    """Exchange as ``Module.to`` does, but keep attributes that the program set on a parameter."""
    fresh = Parameter(target, requires_grad=parameter.requires_grad)
    vars(fresh).update(vars(parameter))
    fresh._backward_hooks = parameter._backward_hooks
    fresh._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
    try:
        torch.utils.swap_tensors(parameter, fresh)
    except RuntimeError as refused:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} on {parameter.device} cannot be moved "
            f"to the host: {refused}; expected one that no graph and no weak reference has"
        ) from refused


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
