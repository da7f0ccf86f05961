"""Parameters that wait on the host: which may, and how they move there.

They stay the same objects, with hooks and attributes.

    waiting = waiting_parameters(model, layers, frozen_only=True)
    check_waiting(model, layers, waiting)
    place(model, [waiting.values()], copies)

NOTE [ Modules that are refused ]
    A scripted or traced module computes outside of Python, with parameters of its own. An RNN keeps
    a list of its weights, where tensors on the device would stay, and gives them other memory on a
    GPU. The older norms of PyTorch, and its pruning, compute a weight in a forward pre-hook: it
    would stay on the device until the next forward, and a hook of the layer itself runs before the
    layer is there. A parametrization has no hook: it computes when the forward asks.

NOTE [ Loss scale ]
    For gradients on another device PyTorch's ``GradScaler`` copies its scale, and a flag for
    infinite gradients, with ``non_blocking=True``; so do fused optimizers. Such a copy to the host
    is not over when the next operator reads it, and gradients would be divided by what that memory
    held before. So the host waits for these copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.jit import ScriptModule
from torch.nn import Module, Parameter, RNNBase
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pp_offload._common.checks import brief, check_all
from pp_offload._common.torch_private import ScaleCopies, has_compatible_shallow_copy_type
from pp_offload._core.geometry import is_dense
from pp_offload._memory.addresses import has_storage
from pp_offload._slices.plain_copies import PlainCopies
from pp_offload._slices.slices import HOST
from pp_offload.backends import Backend, check_backend

FSDP_MARK = "_is_fsdp_managed_module"
"""FSDP, first and second, sets it on every module whose parameters it owns; seen in torch 2.13."""


def check_device(name: str, given: object, backend: Backend | None = None) -> torch.device:
    """Return the given device; raise a ValueError if the backend has another one."""
    if not isinstance(given, torch.device | str | int) or isinstance(given, bool):
        raise TypeError(f"{name} is {brief(given)}, expected a torch.device, or its name")
    try:
        device = torch.device(given)
    except RuntimeError as failure:
        raise ValueError(f"{name} is {given!r}: {failure}") from failure
    if backend is not None:
        check_backend(backend)
        expected = backend.device
        is_other = device.index not in (None, expected.index) and device.type != "cpu"
        if device.type != expected.type or is_other:
            raise ValueError(
                f"{name} is {device}, but the backend's is {expected}; expected the same; pass the "
                "backend of this device, or none"
            )
    return device


def sharded_problem(model: Module) -> str | None:
    """Describe the parts of a model that FSDP owns, as a problem; None if it owns none."""
    owned = [name or "the model" for name, m in model.named_modules() if hasattr(m, FSDP_MARK)]
    if not owned:
        return None
    return (
        f"parameters of {owned[:3]} are owned by FSDP; expected layers that are not sharded: a "
        "slice is copied to the device as a whole; wrap the OffloadModel in "
        "DistributedDataParallel, with gloo for tensors of the host, or do without it: "
        "fully_shard(..., offload_policy=CPUOffloadPolicy()) keeps the shards on the host"
    )


def check_waiting(
    model: Module, layers: Mapping[str, Module], waiting: Mapping[str, Parameter]
) -> None:
    """Raise a ValueError for modules and parameters, by name, that cannot wait on the host."""
    _check_memory(model, waiting)
    ids = set(map(id, waiting.values()))
    modules = {
        f"{name}.{inner}".removesuffix("."): module
        for name, layer in layers.items()
        for inner, module in layer.named_modules()
        if any(id(parameter) in ids for parameter in module._parameters.values())
    }
    check_all(
        *(f"{name!r} {problem}" for name, part in modules.items() for problem in _problems(part))
    )


def _problems(module: Module) -> Iterator[str]:
    """Yield problems of a module. See NOTE [ Modules that are refused ]."""
    if isinstance(module, ScriptModule):
        yield "is of TorchScript, expected a plain module; give the module that it was made of"
    if isinstance(module, RNNBase):
        yield (
            "is an RNN of PyTorch, which keeps a list of its weights; expected a module without "
            "one; leave it on the device, outside of the layers, or use RNNCell, LSTMCell, GRUCell"
        )
    for hook in module._forward_pre_hooks.values():
        kinds = {kind.__module__ for kind in type(hook).__mro__}
        for kind in sorted(kind for kind in kinds if kind.startswith("torch.nn.utils.")):
            yield (
                f"has a hook of {kind}, which computes a weight from parameters that wait on the "
                "host; expected none; use the function of this name in "
                "torch.nn.utils.parametrizations, or make pruning permanent with "
                "torch.nn.utils.prune.remove()"
            )


def _check_memory(model: Module, waiting: Mapping[str, Parameter]) -> None:
    odd = [
        name
        for name, p in waiting.items()
        if not has_storage(p) or type(p.data) is not Tensor or p.is_meta or not is_dense(p)
    ]
    if odd:
        raise ValueError(
            f"parameters {odd} are no dense tensors with data; expected plain nn.Parameter; "
            "materialize lazy and meta parameters first, make others of tensor.contiguous(), and "
            "do not shard or quantize what waits on the host"
        )
    names = {id(p): name for name, p in (*model.named_parameters(), *waiting.items())}
    spans = sorted(
        (p.data_ptr(), p.data_ptr() + p.nbytes, names[id(p)])
        for p in model.parameters()
        if has_storage(p) and p.numel()
    )
    tied: list[tuple[str, str]] = []
    reach, furthest = -1, ""
    for begin, end, name in spans:
        # A flat parameter may overlap several others: compare with the one that ends last.
        if begin < reach and (name in waiting or furthest in waiting):
            tied.append((furthest, name))
        if end > reach:
            reach, furthest = end, name
    if tied:
        raise ValueError(
            f"parameters {tied} share memory; expected each to have its own, or one nn.Parameter "
            "under several names, as in head.weight = embedding.weight"
        )


def waiting_parameters(
    model: Module, layers: Mapping[str, Module], *, frozen_only: bool
) -> dict[str, Parameter]:
    """Return parameters of layers that wait on the host, by name; a ValueError if there are none.
    One used outside of the layers too, such as a tied embedding, stays on the device: there it
    would be used without its layer. One of several layers waits on the host; each layer loads it
    for itself, and its gradients are summed on the host.
    """
    inside = {module for layer in layers.values() for module in layer.modules()}
    others = [module for module in model.modules() if module not in inside]
    outside = {id(parameter) for module in others for parameter in module._parameters.values()}
    waiting = {
        f"{name}.{inner}": parameter
        for name, layer in layers.items()
        for inner, parameter in layer.named_parameters()
        if id(parameter) not in outside and not (frozen_only and parameter.requires_grad)
    }
    if not waiting:
        frozen = " frozen" if frozen_only else ""
        raise ValueError(
            f"layers {list(layers)} have no{frozen} parameters of their own; expected some that "
            "could wait on the host; name another list of layers, freeze the base with "
            "requires_grad_(False) first, or pass frozen_only=False"
        )
    return waiting


# Moves


def place(
    model: Module,
    slices: Iterable[Iterable[Parameter]],
    copies: PlainCopies,
    others: Iterable[Parameter] = (),
) -> None:
    """Move parameters to host memory from which the device can copy beside compute, a slice in an
    allocation, and all else to the device, but for the ``others``, which wait already.
    """
    if not copies.backend.is_host and ScaleCopies.get is _get_at_once:
        ScaleCopies.get = _get
        register_optimizer_step_pre_hook(_scales_to_host)
    device, on_host = copies.backend.device, set[int]()
    for parameters in slices:
        new = [parameter for parameter in parameters if id(parameter) not in on_host]
        on_host.update(map(id, new))
        if copies.backend.is_host or not new:
            host = [parameter.detach().to(HOST) for parameter in new]
        else:
            memory = zip(copies.host_tensors(new), new, strict=True)
            host = [copy.copy_(parameter.detach()) for copy, parameter in memory]
        for parameter, copy in zip(new, host, strict=True):
            move(parameter, copy)
    on_host.update(map(id, others))
    for parameter in model.parameters():
        if id(parameter) not in on_host and parameter.device != device:
            move(parameter, parameter.detach().to(device))
    moved: dict[int, Tensor] = {}  # a buffer registered twice remains one object
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))


def move(parameter: Parameter, target: Tensor) -> None:
    """Move a parameter and its gradient to ``target``'s memory; a ValueError if PyTorch refuses."""
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


def _get(copies: Any, device: torch.device) -> Tensor:
    """Have a scale arrive on the host before it is read. See NOTE [ Loss scale ]."""
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
