"""A model whose parameters stay on the host; the device has the slice that computes, and the next.

    model = OffloadModel(nn.Sequential(*layers), torch.device("cuda"), num_slices=8)
    optimizer = torch.optim.AdamW(model.parameters())  # on the host
    loss_fn(model(x), target).backward()               # gradients are on the host, too
    optimizer.step()

The slices are consecutive layers, balanced by the bytes of their parameters. Forward goes through
them in order, backward in reverse; the next slice is copied to the device while the current one
computes, and the current one is given up when it is done. Autograd saves references to parameters
instead of tensors. All else that it saves stays on the device: offload it with
``checkpoint_activation=True`` or with :class:`~pp_offload.OffloadActivations` around the call.

NOTE [ Order of sums ]
    Gradients of a parameter that several microbatches or layers of a slice use are summed on the
    device, in autograd's order; those of several slices, or several forwards in one backward, on
    the host. Where a parameter has both, the plain model sums in another order, and the last bit
    may differ.
    Gradients of gradients are summed as in the plain model, but for a model whose layers run a
    backward in their forward: then the order varies on an accelerator, with slices or without.
    Under autocast the plain model casts a weight once for all microbatches, and sums its gradients
    in the lower precision; here each use casts, as with ``cache_enabled=False``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pp_offload._activations.stash import ActivationStash
from pp_offload._checkpoint.recompute import Recompute
from pp_offload._common.checks import check_count, check_flag, count_problem, said
from pp_offload._common.torch_private import ActivationWrapper, tree_leaves
from pp_offload._core.statistics import OffloadStatistics
from pp_offload._core.tensors import is_dense
from pp_offload._hooks.regions import is_recomputing
from pp_offload._memory.storages import has_storage
from pp_offload._slices.cache import SliceCache
from pp_offload._slices.gradients import GradientPath, gated, on_device
from pp_offload._slices.layers import RecomputedLayers, SliceLayers
from pp_offload._slices.microbatches import join, split
from pp_offload._slices.plain_copies import PlainCopies
from pp_offload._slices.saved_parameters import SlicedRun
from pp_offload._slices.sharded import sharded_problem
from pp_offload._slices.slices import partition
from pp_offload._slices.spans import Span, overlapping
from pp_offload._slices.stand_ins import StandIns
from pp_offload._slices.to_host import move_to_host
from pp_offload.backends import Backend, check_backend, default_backend
from pp_offload.config import OffloadConfig, config_or_default
from pp_offload.errors import OffloadError

HOST = torch.device("cpu")


class OffloadModel(nn.Module):
    """Trains layers whose parameters, gradients and optimizer stay on the host.

    The layers become its own, under their names: ``state_dict`` is that of ``model``, or of an
    ``nn.ModuleList`` of the list. Their parameters are moved to the host, into pinned memory where
    the device can use that, and their buffers to the device, for good. Layers must not checkpoint
    themselves.

    Args:
        model: A plain :class:`torch.nn.Sequential`, whose layers take one object each, and which is
            cut into slices. Or a list of modules, or an :class:`torch.nn.ModuleList`, each of which
            is a slice: it takes what the one before returns, the elements of a tuple as arguments.
            So the model may have been cut by another tool.
        device: Where it computes. Inputs have to be there.
        offload_device: Where parameters and gradients are: the host.
        num_slices: Into how many slices the layers are cut; about two of them are on the device at
            a time. A list has as many slices as modules, whatever is given here.
        checkpoint_activation: Run each slice again in backward, instead of keeping what it saves;
            its inputs wait on the host.
        num_microbatches: Parts of the batch that go through a slice one after another, while it is
            there: those of ``torch.chunk``, so that the last may be smaller, and there are fewer
            where the batch is too small for so many.
        backend: Of ``device``; made when None.
        config: How much may be in flight, and the tiers of what a checkpoint keeps.

    Raises:
        ValueError: ``model`` is no plain Sequential or list of modules, its parameters are no dense
            tensors with data, a number is out of range or no integer, or a device cannot be used as
            what it is given for.
        TypeError: ``config`` is no :class:`OffloadConfig`, ``backend`` no backend, or a device is
            neither a device nor a name.

    Source: fairscale ``OffloadModel``.
    """

    def __init__(
        self,
        model: nn.Sequential | nn.ModuleList | Sequence[nn.Module],
        device: torch.device | str,
        offload_device: torch.device | str = HOST,
        num_slices: int = 3,
        checkpoint_activation: bool = False,
        num_microbatches: int = 1,
        *,
        backend: Backend | None = None,
        config: OffloadConfig | None = None,
    ) -> None:
        super().__init__()
        layers = _container(model)
        _check_model(layers)
        _check_counts(layers, num_slices, num_microbatches)
        check_flag("checkpoint_activation", checkpoint_activation)
        config = config_or_default(config)
        where, on_host = _device("device", device), _device("offload_device", offload_device)
        if backend is None:
            backend = default_backend(where)
        check_backend(backend)
        _check_devices(where, on_host, backend)
        for name, layer in layers._modules.items():
            self.add_module(name, layer)
        self.training = layers.training
        self._num_microbatches = num_microbatches
        self._is_list = isinstance(layers, nn.ModuleList)
        self._slices = _cut(layers, num_slices)
        self._cache = SliceCache(PlainCopies(backend, config))
        self._stand_ins = StandIns()
        self._recompute: Recompute | None = None
        if checkpoint_activation:
            inputs = ActivationStash("slice inputs", config, backend=backend)
            self._recompute = Recompute(inputs)
        self._place_parameters(backend)
        self._place_buffers(backend.device)

    def forward(self, *inputs: Any) -> Any:
        """The output of the last layer.

        Args:
            inputs: What the first layer takes. With microbatches, tensors are cut along the first
                dimension, wherever they stand; what has none goes to each microbatch.

        Returns:
            That of the layers; of microbatches, put together along the first dimension.

        Raises:
            ValueError: The batch cannot be cut, or the outputs cannot be put together.
            OffloadError: Parameters or buffers were moved to where they do not belong, layers were
                added or deleted, a layer wrote its parameters, or another thread is in a forward of
                this model.
        """
        return self._cache.alone(self._forward, inputs)

    def _forward(self, inputs: tuple[Any, ...]) -> Any:
        self._stand_ins.settle()
        self._check_places()
        layers = list(self._layers())
        run = SlicedRun([one.slice for one in layers], self._cache)
        self._cache.drop()  # a write through .data leaves no trace
        if self._recompute is not None and not is_recomputing():
            self._recompute.begin()
        try:
            values = split(inputs, self._num_microbatches)
            for index, one in enumerate(layers):
                outputs = self._through(run, index, one, values)
                values = [self._arguments(output) for output in outputs]
            output = join(outputs)
        except BaseException:
            self._cache.drop()
            raise
        return output

    def statistics(self) -> OffloadStatistics:
        """What was moved: parameters count as reloaded, gradients as offloaded.

        What ``checkpoint_activation`` moves is not included.
        """
        return self._cache.copies.statistics()

    @property
    def parameter_bytes_on_device(self) -> int:
        """Bytes of parameters that the device has now."""
        return self._cache.nbytes

    @property
    def peak_parameter_bytes_on_device(self) -> int:
        """The most bytes of parameters that the device had at a time."""
        return self._cache.peak_bytes

    def _arguments(self, output: Any) -> tuple[Any, ...]:
        """The arguments that the next slice is called with."""
        return output if self._is_list and isinstance(output, tuple) else (output,)

    def _layers(self) -> Iterator[SliceLayers]:
        """The slices, of the layers as they are now.

        Raises:
            OffloadError: There are more or fewer of them than were cut into slices.
        """
        layers = _layers_of(self)
        if len(layers) != (num := self._slices[-1].stop):
            raise OffloadError(
                f"the OffloadModel has {len(layers)} layers, {list(self._modules)}; expected the "
                f"{num} that it was made of, for these were cut into slices; put one in the place "
                "of another, or make a new OffloadModel of the layers"
            )
        for number, indices in enumerate(self._slices):
            yield SliceLayers(f"slice {number}", [layers[i] for i in indices], self._stand_ins)

    def _through(
        self, run: SlicedRun, index: int, layers: SliceLayers, inputs: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        """All microbatches through one slice."""
        if not layers.slice.parameters:
            return self._compute(run, index, layers, [], [], inputs)
        loaded = run.bring(index)
        versions = [tensor._version for tensor in loaded]
        path = GradientPath(self._cache.copies, layers.slice.label)
        tensors = on_device(layers.slice.parameters, loaded, path)
        inputs, turn = gated(inputs, tensors, path)
        outputs = self._compute(run, index, layers, loaded, tensors, inputs)
        if turn is not None:
            turn.register(outputs)
        if versions != [tensor._version for tensor in loaded]:
            raise OffloadError(
                f"a layer of {layers.slice.label} changed one of its parameters in place in its "
                "forward, which would be lost: it computes with a copy; expected parameters to be "
                "changed outside of forward; make it a buffer"
            )
        return outputs

    def _compute(
        self,
        run: SlicedRun,
        index: int,
        layers: SliceLayers,
        loaded: Sequence[Tensor],
        tensors: Sequence[Tensor],
        inputs: Sequence[tuple[Any, ...]],
    ) -> list[Any]:
        if not torch.is_grad_enabled():
            return [layers.compute_with(tensors, *one) for one in inputs]
        if self._recompute is None:
            return [
                layers.compute_with(tensors, *one, pack=run.pack(index, loaded)) for one in inputs
            ]
        again = RecomputedLayers(layers, run, index, tensors)
        outputs = [self._recompute(again, *one) for one in inputs]
        again.end_of_forward()
        if layers.slice.parameters and any(map(_requires_grad, outputs)):
            run.want(index)
        return outputs

    def _place_parameters(self, backend: Backend) -> None:
        """Move them to the host; those of a slice into one allocation, for a device's copies."""
        placed: set[int] = set()
        for layers in self._layers():
            new = [p for p in layers.slice.parameters if id(p) not in placed]
            placed.update(map(id, new))
            if backend.is_host:
                host_tensors = [parameter.detach().to(HOST) for parameter in new]
            else:
                host_tensors = self._copies_of(new) if new else []
            for parameter, on_host in zip(new, host_tensors, strict=True):
                move_to_host(parameter, on_host)

    def _copies_of(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Copies in memory from which a device can copy beside compute."""
        copies = self._cache.copies.host_tensors(parameters)
        for copy, parameter in zip(copies, parameters, strict=True):
            copy.copy_(parameter.detach())
        return copies

    def _place_buffers(self, device: torch.device) -> None:
        moved: dict[int, Tensor] = {}
        for module in self.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))

    def _check_places(self) -> None:
        if problem := sharded_problem(self):
            raise OffloadError(problem)
        device = self._cache.copies.backend.device
        wrong = [
            f"parameter {name!r} is on {tensor.device}, expected {HOST}"
            for name, tensor in self.named_parameters()
            if tensor.device != HOST
        ] + [
            f"buffer {name!r} is on {tensor.device}, expected {device}"
            for name, tensor in self.named_buffers()
            if tensor.device != device
        ]
        if wrong:
            raise OffloadError(
                "; ".join(wrong) + "; do not move an OffloadModel with .to() or .cuda(): move it "
                "back with model.to('cpu'), and build a new one of nn.Sequential(*model.children())"
            )


def _layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers in order; one that has several names is there several times."""
    return [layer for layer in model._modules.values() if layer is not None]


def _bytes_of(layer: nn.Module) -> dict[int, int]:
    return {id(parameter): parameter.nbytes for parameter in layer.parameters()}


def _container(model: object) -> nn.Module:
    """The module that has the layers; for a list, whose modules are the slices, a ModuleList."""
    if not isinstance(model, list | tuple):
        return _check_kind(model)
    wrong = {i: one for i, one in enumerate(model) if not isinstance(one, nn.Module)}
    if wrong:
        raise ValueError(
            f"slices {list(wrong)} are no modules: {', '.join(map(said, wrong.values()))}; "
            "expected a list of nn.Module objects, each of which is a slice; make one of several "
            "layers with nn.Sequential(*layers)"
        )
    slices = nn.ModuleList(model)
    slices.training = all(one.training for one in model)
    return slices


def _check_kind(model: object) -> nn.Module:
    for kind in (nn.Sequential, nn.ModuleList):
        if isinstance(model, kind) and type(model).forward is kind.forward:
            return model
    raise ValueError(
        f"the model is a {type(model).__name__}; expected an nn.Sequential with its own forward, "
        "which says what each layer computes with, or a list of modules, each of which is a slice; "
        "write the model as one, or cut it with torch.fx"
    )


def _cut(layers: nn.Module, num_slices: int) -> list[range]:
    """The layers of each slice; a list was cut by the caller."""
    found = _layers_of(layers)
    if isinstance(layers, nn.ModuleList):
        return [range(index, index + 1) for index in range(len(found))]
    return partition([_bytes_of(layer) for layer in found], num_slices)


def _check_model(model: nn.Module) -> None:
    kind = "Sequential" if isinstance(model, nn.Sequential) else "ModuleList"
    own = [*model._parameters, *model._buffers]
    if own:
        raise ValueError(
            f"the {kind} itself has {own}; expected parameters and buffers in its layers only; "
            "put them into a layer"
        )
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(model, name) for name in hooks):
        raise ValueError(
            f"the {kind} itself has hooks, which would not run; expected hooks on its layers "
            "only; register them on the OffloadModel"
        )
    if any(isinstance(module, ActivationWrapper) for module in model.modules()):
        raise ValueError(
            "a layer is, or has, a checkpoint wrapper; expected layers that keep what they save; "
            "pass checkpoint_activation=True instead"
        )
    if any(isinstance(module, OffloadModel) for module in model.modules()):
        raise ValueError(
            "a layer is, or has, an OffloadModel; expected plain layers; put its layers into the "
            f"{kind} instead"
        )
    if problem := sharded_problem(model):
        raise ValueError(problem)
    _check_memory(dict(model.named_parameters()))


def _check_memory(parameters: Mapping[str, nn.Parameter]) -> None:
    odd = [name for name, p in parameters.items() if not has_storage(p) or p.is_meta]
    if odd:
        raise ValueError(
            f"parameters {odd} are no dense tensors with data; expected plain nn.Parameter; "
            "materialize lazy and meta parameters first, and do not shard them with FSDP or DTensor"
        )
    gaps = [name for name, p in parameters.items() if not is_dense(p)]
    if gaps:
        raise ValueError(
            f"parameters {gaps} have gaps in memory, or share elements; expected dense ones; make "
            "them of tensor.contiguous()"
        )
    tied = overlapping(
        Span(p.data_ptr(), p.data_ptr() + p.nbytes, name)
        for name, p in parameters.items()
        if p.numel()
    )
    if tied:
        raise ValueError(
            f"parameters {tied} share memory; expected each to have its own, or one nn.Parameter "
            "under several names, as in head.weight = embedding.weight"
        )


def _check_counts(layers: nn.Module, num_slices: int, num_microbatches: int) -> None:
    check_count("num_microbatches", num_microbatches, least=1)
    num_layers = len(_layers_of(layers))
    if isinstance(layers, nn.ModuleList):
        if not num_layers:
            raise ValueError("the list of slices is empty; expected at least one module in it")
        check_count("num_slices", num_slices, least=1)
        return
    if not num_layers:
        raise ValueError("the model has no layers; expected at least one module in it")
    if count_problem("num_slices", num_slices, 1) or num_slices > num_layers:
        most = f"1 to {num_layers}" if num_layers > 1 else "1"
        raise ValueError(
            f"num_slices is {said(num_slices)}; expected {most}, the number of "
            "layers, as an integer, for each slice has at least one"
        )


def _device(name: str, given: object) -> torch.device:
    if isinstance(given, torch.device | str | int) and not isinstance(given, bool):
        try:
            return torch.device(given)
        except RuntimeError as failure:
            raise ValueError(
                f"{name} is {given!r}, expected a device, such as 'cpu': {failure}"
            ) from failure
    raise TypeError(f"{name} is {said(given)}, expected a torch.device, or its name")


def _check_devices(device: torch.device, offload_device: torch.device, backend: Backend) -> None:
    mine = backend.device
    is_same = device.type == mine.type and device.index in (None, mine.index)
    if not (is_same or device.type == mine.type == "cpu"):
        raise ValueError(
            f"device is {device}, but the backend's is {mine}; expected the same; pass the backend "
            "of this device, or none"
        )
    if offload_device.type != "cpu":
        raise ValueError(
            f"offload_device is {offload_device}; expected the host, torch.device('cpu')"
        )


def _requires_grad(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(value))
