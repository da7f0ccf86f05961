"""Moves parameters to the host for good; they stay the same objects, with hooks and attributes.

move_to_host(parameter, on_host)  # parameter.is_cpu; optimizers and tied layers still have it
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from pp_offload._common.torch_private import has_compatible_shallow_copy_type


def move_to_host(parameter: Parameter, on_host: Tensor) -> None:
    """Give a parameter other memory, which may be on another device; its gradient goes along.

    Args:
        parameter: Stays the same object.
        on_host: Has its values.

    Raises:
        ValueError: PyTorch cannot do it, for something else refers to the parameter.
    """
    gradient, parameter.grad = parameter.grad, None
    try:
        # PyTorch's own devices can be exchanged by .data; a device of a plug-in cannot.
        if has_compatible_shallow_copy_type(parameter, on_host):
            parameter.data = on_host
        else:
            _exchange(parameter, on_host)
    finally:
        if gradient is not None:
            parameter.grad = gradient.to(parameter.device)


def _exchange(parameter: Parameter, on_host: Tensor) -> None:
    """As ``Module.to`` does it, but keeps what the program has attached to the parameter."""
    fresh = Parameter(on_host, requires_grad=parameter.requires_grad)
    vars(fresh).update(vars(parameter))
    fresh._backward_hooks = parameter._backward_hooks
    fresh._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
    try:
        torch.utils.swap_tensors(parameter, fresh)
    except RuntimeError as refused:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} on {parameter.device} cannot be moved "
            f"to the host: {refused}; expected one that no graph and no weak reference has; build "
            "the OffloadModel before the first forward, or of model.to('cpu')"
        ) from refused
