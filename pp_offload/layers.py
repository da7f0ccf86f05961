"""Parameters of any model's layers on the host; the device has the layer that computes.

    offloaded = offload_layers(model, "model.layers", frozen_only=True)
    loss = model(**batch).loss                 # each layer is there while it computes
    loss.backward()                            # and again in backward
    optimizer.step()                           # on the host, for what waits there
    print(offloaded.peak_parameter_bytes_on_device)
    offloaded.close()

The model stays what it is: its class, its names, its parameters as objects. Parameters of the
layers wait on the host, pinned once. The next layer comes while one computes; which it is, the last
forward tells. Gradients of these parameters come to the host, where their optimizer is. With
``frozen_only``, only what does not require grad waits: of a model with adapters the base is
streamed, and the adapters, their gradients and their optimizer stay on the device. The base is
never copied back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch.nn import Module, ModuleList, Sequential
from torch.nn.parallel import DistributedDataParallel

from pp_offload._common.checks import check_flag, check_kind, count_problem, near
from pp_offload._slices.cache import SliceCache
from pp_offload._slices.offloaded_layers import OffloadedLayers, install, waits
from pp_offload._slices.places import Places
from pp_offload._slices.plain_copies import PlainCopies
from pp_offload._slices.waiting import waiting_parameters
from pp_offload.backends import Backend, check_backend, default_backend
from pp_offload.config import OffloadConfig, config_or_default
from pp_offload.errors import OffloadError
from pp_offload.modules import matching
from pp_offload.offload_model import OffloadModel

CHECKPOINTED = "_checkpoint_wrapped_module"
"""Under this name a checkpoint wrapper has its layer."""


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
    """Keep parameters of a model's layers on the host, and bring each layer when it computes.

    Args:
        model: Changed in place. What is not in the layers, and buffers, is moved to the device.
        layers: Name of an :class:`torch.nn.ModuleList` or :class:`torch.nn.Sequential` whose
            children are the layers, or several; ``*`` stands for one part between dots.
        frozen_only: Only what does not require grad now waits on the host.
        num_resident: How many layers are on the device at a time, at most. With 1, a layer is
            brought when it is needed; with 2, the next one comes meanwhile.
        device: Where the model computes. By default where its parameters are, or the accelerator if
            they are on the host and there is one.
        backend: Of the device; made when None.
        config: How much host memory, and how much may be in flight.

    Returns:
        A handle with figures, which undoes it; also a context manager.

    Raises:
        ValueError: No such module, and the message lists one that comes near, or it is no list of
            layers; a layer is named twice or inside another; nothing in them could wait on the
            host; ``num_resident`` is no integer of at least 1; parameters are no dense tensors with
            data, or share memory; a hook of a layer itself, as that of a spectral norm, computes a
            weight from them, or TorchScript has them; the model is a ``DistributedDataParallel``.
        TypeError: An argument is of another kind.
        OffloadError: Layers wait on the host already.

    Source: the idea of axolotl's ``layer_offloading``.
    """
    check_kind("model", model, Module, "an nn.Module")
    check_flag("frozen_only", frozen_only)
    config = config_or_default(config)
    backend = _backend(model, device, backend)
    containers = _containers(model, layers)
    found = _layers_of(containers)
    _check_model(model)
    _check_free(found)
    if problem := count_problem("num_resident", num_resident, 1):
        raise ValueError(problem)
    waiting = waiting_parameters(model, found, frozen_only=frozen_only)
    places = {name: (layer, Places(layer, waiting.__contains__)) for name, layer in found.items()}
    cache = SliceCache(PlainCopies(backend, config), min(num_resident, len(found)))
    return install(model, places, _around(model, containers), cache)


def lists_of_layers(model: Module) -> list[str]:
    """Names of the lists that a model most likely has its layers in.

    Those are the outermost :class:`torch.nn.ModuleList` of at least two layers, all of one class
    and with parameters: ``model.layers``, ``transformer.h``, or the blocks of an encoder and of a
    decoder.

    Raises:
        ValueError: There are none.
    """
    found: list[str] = []
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, ModuleList) and not is_inside and _are_layers(list(module)):
            found.append(name)
    if not found:
        raise ValueError(
            f"a {type(model).__name__} has no ModuleList of several layers of one class; expected "
            "one; say where its layers are: layers=..."
        )
    return found


def _are_layers(modules: list[Module]) -> bool:
    has_parameters = any(next(one.parameters(), None) is not None for one in modules)
    return len(modules) > 1 and len({type(one) for one in modules}) == 1 and has_parameters


def _backend(model: Module, device: torch.device | str | None, backend: Backend | None) -> Backend:
    if backend is not None:
        check_backend(backend)
        if device is not None and torch.device(device).type != backend.device.type:
            raise ValueError(
                f"device is {device}, but the backend's is {backend.device}; expected the same; "
                "pass one of them"
            )
        return backend
    if device is not None:
        check_kind("device", device, (torch.device, str), "a torch.device, or its name")
        return default_backend(torch.device(device))
    there = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    if len(there) > 1:
        raise ValueError(
            f"the model is on {sorted(map(str, there))}, expected one device; say device=... to "
            "have it moved there"
        )
    return default_backend(there.pop() if there else None)


def _containers(model: Module, layers: str | Collection[str]) -> dict[str, Module]:
    """The lists of layers by name."""
    expected = 'the name of a ModuleList, such as "model.layers", or several names'
    check_kind("layers", layers, (str, Collection), expected)
    patterns = [layers] if isinstance(layers, str) else list(layers)
    for pattern in patterns:
        check_kind("a name in layers", pattern, str, expected)
    lists = [
        n for n, one in model.named_modules() if n and isinstance(one, ModuleList | Sequential)
    ]
    if not patterns:
        raise ValueError(f"layers is empty, expected {expected}; the model has {lists}")
    names = {pattern: matching(model, pattern) for pattern in patterns}
    if missing := [f"{p!r}{near(p, lists)}" for p, found in names.items() if not found]:
        raise ValueError(
            f"the model has no module {', '.join(missing)}; expected {expected}; it has {lists}"
        )
    found = {name: model.get_submodule(name) for one in names.values() for name in one}
    wrong = [
        f"{name!r} is a {type(one).__name__}{near(name, lists)}"
        for name, one in found.items()
        if not isinstance(one, ModuleList | Sequential)
    ]
    if wrong:
        raise ValueError(
            f"{'; '.join(wrong)}; expected a ModuleList or a Sequential, whose children are the "
            f"layers; the model has {lists}"
        )
    return found


def _layers_of(containers: dict[str, Module]) -> dict[str, Module]:
    """Layers by name, each once, without what a checkpoint wrapped around them."""
    found: dict[str, Module] = {}
    for name, container in containers.items():
        for child, layer in container.named_children():
            while CHECKPOINTED in layer._modules:
                layer = layer.get_submodule(CHECKPOINTED)
            found.setdefault(f"{name}.{child}", layer)
    if not found:
        raise ValueError(
            f"the lists {list(containers)} are empty; expected at least one layer; name another"
        )
    inside = [
        f"{name!r} is inside of {other!r}"
        for name, layer in found.items()
        for other, around in found.items()
        if layer is not around and any(layer is one for one in around.modules())
    ]
    if inside:
        raise ValueError(
            f"{'; '.join(inside)}; expected layers beside one another; leave one of the lists out"
        )
    return found


def _check_model(model: Module) -> None:
    if any(isinstance(one, DistributedDataParallel) for one in model.modules()):
        raise ValueError(
            "the model is, or has, a DistributedDataParallel, which has noted where each gradient "
            "is; expected a plain module; call offload_layers() before it is wrapped, which works "
            "where all parameters are on one device"
        )
    if any(isinstance(one, OffloadModel) for one in model.modules()):
        raise ValueError(
            "the model is, or has, an OffloadModel, which brings its parameters itself; expected "
            "plain modules; choose one of the two"
        )


def _check_free(layers: dict[str, Module]) -> None:
    taken = [name for name, layer in layers.items() if waits(layer)]
    if taken:
        raise OffloadError(
            f"layers {taken} wait on the host already; expected each to be given once; close() the "
            "handle that came first"
        )


def _around(model: Module, containers: dict[str, Module]) -> Iterator[Module]:
    """The model, and the modules that have the lists: each is a forward's begin, if outermost."""
    found = {id(model): model}
    for name in containers:
        parent, _, _ = name.rpartition(".")
        owner = model.get_submodule(parent)
        found[id(owner)] = owner
    yield from found.values()
