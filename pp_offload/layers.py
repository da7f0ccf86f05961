"""Offload of parameters of any model's layers; the device holds the layer that computes.

    offloaded = offload_layers(model, "model.layers", frozen_only=True)
    model(**batch).loss.backward()  # each layer is loaded when it computes
    optimizer.step()                # on the host, for offloaded parameters

The model keeps its class, its names, and its parameters as objects.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.nn import Module, ModuleList, Sequential
from torch.nn.parallel import DistributedDataParallel

from pp_offload._common.checks import check_count, check_flag, check_kind, near
from pp_offload._slices.cache import SliceCache
from pp_offload._slices.offloaded_layers import OffloadedLayers, install
from pp_offload._slices.plain_copies import PlainCopies
from pp_offload._slices.waiting import check_device, check_waiting, waiting_parameters
from pp_offload.backends import Backend, backend_or_default, default_backend
from pp_offload.config import OffloadConfig, config_or_default
from pp_offload.modules import matching

CHECKPOINTED = "_checkpoint_wrapped_module"  # attribute of a checkpoint wrapper: its layer


def offload_layers(
    model: Module,
    layers: str | Collection[str],
    frozen_only: bool = False,
    num_resident: int = 2,
    *,
    device: torch.device | str | None = None,
    backend: Backend | None = None,
    config: OffloadConfig | None = None,
) -> OffloadedLayers:
    """Keep parameters of a model's layers on the host, and load each layer when it computes.

    A call for layers that wait already closes their earlier handle.

    Args:
        model: Changed in place. Parameters outside the layers, and all buffers, move to the device.
        layers: Name of an :class:`torch.nn.ModuleList` or :class:`torch.nn.Sequential` whose
            children are the layers, or several; ``*`` stands for one part between dots.
        frozen_only: Only parameters that do not require grad at this call wait on the host.
        num_resident: Most layers on the device at a time. With 1, a layer is loaded when it is
            needed; with 2, the next layer is prefetched meanwhile.
        device: Device that computes; by default the device of the parameters or, if they are on the
            host, the accelerator if present.
        backend: Backend of the device; made when None.
        config: Limits on host memory, and on bytes in flight.

    Returns:
        A handle with figures, which undoes the offload; also a context manager.

    Raises:
        ValueError: No such list of layers exists; nothing in them could wait on the host;
            ``num_resident`` is no integer of at least 1; parameters are no dense tensors with data,
            or share memory, or belong to RNNs, TorchScript or hooks that compute weights; the model
            is a ``DistributedDataParallel``.
        TypeError: An argument is of another kind.

    Source: the idea of axolotl's ``layer_offloading``.
    """
    check_kind("model", model, Module, "an nn.Module")
    check_flag("frozen_only", frozen_only)
    config = config_or_default(config)
    backend = _backend(model, device, backend)
    containers = _containers(model, layers)
    named = _layers_of(containers)
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "the model is, or has, a DistributedDataParallel, which has noted where each gradient "
            "is; expected a plain module; call offload_layers() before it is wrapped, which works "
            "where all parameters are on one device"
        )
    check_count("num_resident", num_resident, least=1)
    waiting = waiting_parameters(model, named, frozen_only=frozen_only)
    check_waiting(model, named, waiting)
    cache = SliceCache(PlainCopies(backend, config), min(num_resident, len(named)))
    # A forward begins in the outermost of the model and the modules that hold the lists.
    owners = [model.get_submodule(name.rpartition(".")[0]) for name in containers]
    around = {id(module): module for module in (model, *owners)}.values()
    return install(model, named, set(map(id, waiting.values())), around, cache)


def lists_of_layers(model: Module) -> list[str]:
    """Return the names of the lists that most likely hold the layers of a model: the outermost
    :class:`torch.nn.ModuleList` of at least two layers, all of one class and with parameters, such
    as ``model.layers``, ``transformer.h``, or the blocks of an encoder and of a decoder. Raise a
    ValueError if there is none.
    """
    names: list[str] = []
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in names)
        if isinstance(module, ModuleList) and len(module) > 1 and not is_inside:
            has_parameters = next(module.parameters(), None) is not None
            if has_parameters and len(set(map(type, module))) == 1:
                names.append(name)
    if not names:
        raise ValueError(
            f"a {type(model).__name__} has no ModuleList of several layers of one class; expected "
            "one; say where its layers are: layers=..."
        )
    return names


def _backend(model: Module, device: torch.device | str | None, backend: Backend | None) -> Backend:
    where = None if device is None else check_device("device", device, backend)
    if backend is None and where is None:
        devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
        if len(devices) > 1:
            raise ValueError(
                f"the model is on {sorted(map(str, devices))}, expected one device; say device=... "
                "to have it moved there"
            )
        where = devices.pop() if devices else None
    return default_backend(where) if backend is None else backend_or_default(backend)


def _containers(model: Module, layers: str | Collection[str]) -> dict[str, Module]:
    """Return the lists of layers by name."""
    expected = 'the name of a ModuleList, such as "model.layers", or several names'
    check_kind("layers", layers, (str, Collection), expected)
    patterns = [layers] if isinstance(layers, str) else list(layers)
    lists = {
        name: module
        for name, module in model.named_modules()
        if name and isinstance(module, ModuleList | Sequential)
    }
    if not patterns:
        raise ValueError(f"layers is empty, expected {expected}; the model has {list(lists)}")
    containers: dict[str, Module] = {}
    for pattern in patterns:
        check_kind("a name in layers", pattern, str, expected)
        names = [name for name in matching(model, pattern) if name in lists]
        if not names:
            raise ValueError(
                f"the model has no module {pattern!r}{near(pattern, list(lists))} that is a "
                "ModuleList or a Sequential, whose children are the layers; expected "
                f"{expected}; it has {list(lists)}"
            )
        containers |= {name: lists[name] for name in names}
    return containers


def _layers_of(containers: dict[str, Module]) -> dict[str, Module]:
    """Return layers by name, without duplicates and without checkpoint wrappers."""
    layers: dict[str, Module] = {}
    for name, container in containers.items():
        for child, layer in container.named_children():
            while CHECKPOINTED in layer._modules:
                layer = layer.get_submodule(CHECKPOINTED)
            layers.setdefault(f"{name}.{child}", layer)
    if not layers:
        raise ValueError(
            f"the lists {list(containers)} are empty; expected at least one layer; name another"
        )
    return layers
