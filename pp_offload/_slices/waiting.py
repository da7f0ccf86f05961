"""Which parameters of a model's layers can wait on the host.

NOTE [ Who else has it ]
    A parameter that something outside of the layers has as well, such as a tied embedding, stays on
    the device: there it would be used without its layer. One that several layers have waits on the
    host; each layer brings it for itself, and its gradients are summed on the host.

NOTE [ TorchScript ]
    A scripted or traced module computes outside of Python, and a copy of it has its own forward
    again, whatever stood in its place: the copy's parameters would be used on the host.

Call pattern:

    waiting = waiting_parameters(model, {"layers.0": layer}, frozen_only=True)
    places = Places(layer, waiting.__contains__)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.jit import ScriptModule
from torch.nn import Module, Parameter

from pp_offload._core.tensors import is_dense
from pp_offload._memory.storages import has_storage
from pp_offload._slices.spans import Span, overlapping
from pp_offload._slices.weight_hooks import check_hooks


class Parameters:
    """Parameters by identity."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.all = parameters
        self._ids = {id(one) for one in parameters}

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._ids


def waiting_parameters(
    model: Module, layers: Mapping[str, Module], *, frozen_only: bool
) -> Parameters:
    """Parameters that wait on the host. See NOTE [ Who else has it ].

    Args:
        model: That has the layers.
        layers: By name.
        frozen_only: Only those that do not require grad.

    Raises:
        ValueError: There are none; or some are no dense tensors with data, share memory, are of
            TorchScript, or are what a hook of a layer itself computes a weight from.
    """
    inside = {id(module) for layer in layers.values() for module in layer.modules()}
    outside = Parameters(
        [
            parameter
            for module in model.modules()
            if id(module) not in inside
            for parameter in module._parameters.values()
            if parameter is not None
        ]
    )
    named = {
        f"{name}.{inner}": parameter
        for name, layer in layers.items()
        for inner, parameter in layer.named_parameters()
        if parameter not in outside and not (frozen_only and parameter.requires_grad)
    }
    if not named:
        frozen = " frozen" if frozen_only else ""
        raise ValueError(
            f"layers {list(layers)} have no{frozen} parameters of their own; expected some that "
            "could wait on the host; " + _advice(frozen_only)
        )
    _check_memory(model, named)
    waiting = Parameters(list(named.values()))
    _check_scripts(layers, waiting)
    check_hooks(layers, waiting)
    return waiting


def _advice(frozen_only: bool) -> str:
    if frozen_only:
        return "freeze the base with requires_grad_(False) first, or say frozen_only=False"
    return "name another list of layers"


def _check_memory(model: Module, waiting: dict[str, Parameter]) -> None:
    odd = [
        name
        for name, p in waiting.items()
        if type(p.data) is not Tensor or not has_storage(p) or p.is_meta or not is_dense(p)
    ]
    if odd:
        raise ValueError(
            f"parameters {odd} are no dense tensors with data; expected plain nn.Parameter; "
            "materialize lazy and meta parameters first, make others of tensor.contiguous(), and "
            "do not shard or quantize what waits on the host"
        )
    mine = {id(p): name for name, p in waiting.items()}
    names = {id(p): mine.get(id(p), name) for name, p in model.named_parameters()}
    spans = [
        Span(p.data_ptr(), p.data_ptr() + p.nbytes, names[id(p)])
        for p in model.parameters()
        if has_storage(p) and p.numel()
    ]
    tied = [pair for pair in overlapping(spans) if any(name in waiting for name in pair)]
    if tied:
        raise ValueError(
            f"parameters {tied} share memory; expected each to have its own, or one nn.Parameter "
            "under several names, as in head.weight = embedding.weight"
        )


def _check_scripts(layers: Mapping[str, Module], waiting: Parameters) -> None:
    """See NOTE [ TorchScript ]."""
    scripts = [
        f"{name}.{inner}".removesuffix(".")
        for name, layer in layers.items()
        for inner, module in layer.named_modules()
        if isinstance(module, ScriptModule)
        and any(one in waiting for one in module._parameters.values())
    ]
    if scripts:
        raise ValueError(
            f"modules {scripts} are of TorchScript, which computes with parameters of its own; "
            "expected plain modules where parameters wait on the host; give the modules that they "
            "were made of"
        )
