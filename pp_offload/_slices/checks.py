"""Checks of parameters and modules that wait on the host, in slices or in layers of a model.

    waiting = waiting_parameters(model, {"layers.0": layer}, frozen_only=True)
    check_waiting(model, {"layers.0": layer}, waiting)

NOTE [ Modules that are refused ]
    A scripted or traced module computes outside of Python, with parameters of its own. An RNN keeps
    a list of its weights, where tensors on the device would stay, and gives them other memory on a
    GPU. The older norms of PyTorch, and its pruning, compute a weight in a forward pre-hook: it
    would stay on the device until the next forward, and a hook of the layer itself runs before the
    layer is there. A parametrization has no hook: it computes when the forward asks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor
from torch.jit import ScriptModule
from torch.nn import Module, Parameter, RNNBase

from pp_offload._core.geometry import is_dense
from pp_offload._memory.storages import has_storage

FSDP_MARK = "_is_fsdp_managed_module"
"""FSDP, first and second, sets it on every module whose parameters it owns; seen in torch 2.13."""


def sharded_problem(model: Module) -> str | None:
    """Describe the parts of a model that FSDP owns, as a problem; None if it owns none."""
    names = [
        name or "the model" for name, part in model.named_modules() if hasattr(part, FSDP_MARK)
    ]
    if not names:
        return None
    return (
        f"parameters of {names[:3]} are owned by FSDP; expected layers that are not sharded; "
        "fully_shard(..., offload_policy=CPUOffloadPolicy()) keeps shards on the host"
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
    problems = [
        f"{name!r} {problem}" for name, module in modules.items() for problem in _problems(module)
    ]
    if problems:
        raise ValueError("; ".join(problems))


def _problems(module: Module) -> Iterator[str]:
    """Yield problems of a module. See NOTE [ Modules that are refused ]."""
    if isinstance(module, ScriptModule | RNNBase):
        yield (
            f"is a {type(module).__name__}, whose weights are in a list of its own as well; "
            "expected a plain module, such as a GRUCell; leave it outside of the layers"
        )
    for hook in module._forward_pre_hooks.values():
        kinds = {kind.__module__ for kind in type(hook).__mro__}
        for kind in sorted(kind for kind in kinds if kind.startswith("torch.nn.utils.")):
            yield (
                f"has a hook of {kind}, which computes a weight ahead of the forward; expected "
                "none; use torch.nn.utils.parametrizations, or end pruning with prune.remove()"
            )


def _check_memory(model: Module, waiting: Mapping[str, Parameter]) -> None:
    odd = [name for name, p in waiting.items() if not _is_plain(p)]
    if odd:
        raise ValueError(
            f"parameters {odd} are no dense tensors with data; expected plain nn.Parameter: "
            "not lazy, on meta, sharded or quantized"
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
            f"parameters {tied} share memory; expected one nn.Parameter under several names"
        )


def _is_plain(parameter: Parameter) -> bool:
    is_tensor = has_storage(parameter) and type(parameter.data) is Tensor
    return is_tensor and not parameter.is_meta and is_dense(parameter)


def waiting_parameters(
    model: Module, layers: Mapping[str, Module], *, frozen_only: bool
) -> dict[str, Parameter]:
    """Return parameters of layers that wait on the host, by name; a ValueError if there are none.

    A parameter used outside of the layers too, such as a tied embedding, stays on the device:
    there it would be used without its layer. A parameter of several layers waits on the host;
    each layer loads it for itself, and its gradients are summed on the host.
    """
    inside = {id(module) for layer in layers.values() for module in layer.modules()}
    outside = {
        id(parameter)
        for module in model.modules()
        if id(module) not in inside
        for parameter in module._parameters.values()
    }
    waiting = {
        f"{name}.{inner}": parameter
        for name, layer in layers.items()
        for inner, parameter in layer.named_parameters()
        if id(parameter) not in outside and not (frozen_only and parameter.requires_grad)
    }
    if not waiting:
        frozen = " frozen" if frozen_only else ""
        raise ValueError(
            f"layers {list(layers)} have no{frozen} parameters of their own that could wait on "
            "the host; name other layers, freeze the base first, or pass frozen_only=False"
        )
    return waiting
