"""Model whose parameters stay on the host; the device holds the current slice and the next.

    model = OffloadModel(nn.Sequential(*layers), torch.device("cuda"), num_slices=8)
    optimizer = torch.optim.AdamW(model.parameters())  # on the host

The next slice is copied to the device while the current one computes, in forward and, in reverse,
in backward. Autograd saves references to parameters instead of tensors. Inputs are cut into
microbatches, and outputs joined, wherever tensors stand in tuples, lists and dicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pp_offload._checkpoint.options import FullACParams
from pp_offload._checkpoint.recompute import Recompute
from pp_offload._common.checks import brief, check_all, check_count, check_flag, count_problem
from pp_offload._common.torch_private import ActivationWrapper, tree_flatten, tree_unflatten
from pp_offload._hooks import is_recomputing
from pp_offload._slices.cache import CacheFigures, SliceCache
from pp_offload._slices.plain_copies import PlainCopies
from pp_offload._slices.saved_parameters import OnDevice, SlicedRun
from pp_offload._slices.slices import HOST, SliceLayers, partition
from pp_offload._slices.waiting import check_device, check_waiting, place, sharded_problem
from pp_offload.backends import Backend, default_backend
from pp_offload.config import OffloadConfig, config_or_default
from pp_offload.errors import OffloadError


class OffloadModel(CacheFigures, nn.Module):
    """Model for training whose parameters, gradients and optimizer stay on the host.

    The layers become submodules under their names: ``state_dict`` is that of ``model``, or of an
    ``nn.ModuleList`` of the list. Their parameters are moved to the host, into pinned memory where
    the device can use that, and their buffers to the device, for good. Layers must not checkpoint
    themselves.

    Args:
        model: A plain :class:`torch.nn.Sequential`, whose layers take one object each, to be cut
            into slices. Or a list of modules, or an :class:`torch.nn.ModuleList`, each of which is
            a slice: it takes the output of the one before, with a tuple's elements as arguments,
            so another tool may cut the model.
        device: Device that computes. Inputs must be on it.
        offload_device: Device of parameters and gradients: the host.
        num_slices: Number of slices that the layers are cut into; about two of them are on the
            device at a time. A list has as many slices as modules, and ignores this.
        checkpoint_activation: Run each slice again in backward, instead of keeping the tensors
            that it saves; its inputs wait on the host.
        num_microbatches: Parts of the batch that go through a slice one after another, while the
            slice is loaded, as of ``torch.chunk``: the last may be smaller, and a small batch has
            fewer parts.
        backend: Backend of ``device``; made when None.
        config: Limits on bytes in flight, and the tiers of tensors that a checkpoint keeps.

    Raises:
        ValueError: The model, its modules or parameters, a number or a device cannot be used.
        TypeError: An argument is of another kind.

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
        _check(layers, num_slices, num_microbatches)
        check_flag("checkpoint_activation", checkpoint_activation)
        config = config_or_default(config)
        where = check_device("device", device, backend)
        if check_device("offload_device", offload_device).type != "cpu":
            raise ValueError(
                f"offload_device is {offload_device}; expected the host, torch.device('cpu')"
            )
        backend = default_backend(where) if backend is None else backend
        for name, layer in layers._modules.items():
            self.add_module(name, layer)
        self.training = layers.training
        self._num_microbatches = num_microbatches
        self._is_list = isinstance(layers, nn.ModuleList)
        sizes = [{id(p): p.nbytes for p in layer.parameters()} for layer in _layers_of(self)]
        self._slices = partition(sizes, len(layers) if self._is_list else num_slices)
        self._cache = SliceCache(PlainCopies(backend, config))
        params = FullACParams(offload_inputs=True, config=config)
        self._recompute = Recompute(params, backend) if checkpoint_activation else None
        slices = [layers.places.parameters() for layers in self._slice_layers()]
        place(self, slices, self._cache.copies)

    def forward(self, *inputs: Any) -> Any:
        """Compute all layers, and return the output of the last one.

        Args:
            inputs: Arguments of the first layer. With microbatches, tensors are cut along the first
                dimension, also in containers; other values go to each microbatch.

        Raises:
            ValueError: The batch cannot be cut, or the outputs cannot be joined.
            OffloadError: Parameters were moved, layers were added or deleted, a layer wrote its
                parameters, or another thread is in a forward of this model.
        """
        return self._cache.locked(self._forward, inputs)

    def extra_repr(self) -> str:
        return self._figures(self.parameters())

    def _forward(self, inputs: tuple[Any, ...]) -> Any:
        if problem := sharded_problem(self):
            raise OffloadError(problem)
        slices = self._slice_layers()
        self._cache.clear()  # a write through .data leaves no trace
        if self._recompute is not None and not is_recomputing():
            self._recompute.begin()
        run = SlicedRun(self._cache)
        try:
            values = _split(inputs, self._num_microbatches)
            for index, layers in enumerate(slices):
                later = (each.places for each in slices[index + 1 :])
                with OnDevice(run, layers.places, later, self._recompute is not None) as slice_:
                    outputs = [self._compute(slice_, layers, arguments) for arguments in values]
                # If slices are modules, a tuple's elements are arguments of the next slice.
                values = [
                    output if self._is_list and isinstance(output, tuple) else (output,)
                    for output in outputs
                ]
            return _join(outputs)
        except BaseException:
            self._cache.clear()
            raise

    def _compute(self, slice_: OnDevice, layers: SliceLayers, inputs: tuple[Any, ...]) -> Any:
        if self._recompute is None or not torch.is_grad_enabled():
            return slice_.compute(partial(layers, *inputs))

        def again(*inputs: Any) -> Any:
            return slice_.compute(partial(layers, *inputs), saves=False)

        return self._recompute(again, *inputs)

    def _slice_layers(self) -> list[SliceLayers]:
        """Make slices of the current layers; raise an OffloadError if their number has changed."""
        layers = _layers_of(self)
        if len(layers) != (num := self._slices[-1].stop):
            raise OffloadError(
                f"the OffloadModel has {len(layers)} layers, {list(self._modules)}; expected the "
                f"{num} that it was made of: these were cut into slices; put one in the place "
                "of another, or make a new OffloadModel of the layers"
            )
        return [
            SliceLayers(f"slice {number}", [layers[i] for i in indices])
            for number, indices in enumerate(self._slices)
        ]


def _layers_of(model: nn.Module) -> list[nn.Module]:
    # A layer with several names is listed several times.
    return [layer for layer in model._modules.values() if layer is not None]


def _container(model: object) -> nn.Sequential | nn.ModuleList:
    """Return the module with the layers; for a list, a ModuleList, whose modules are slices."""
    if isinstance(model, list | tuple) and all(isinstance(module, nn.Module) for module in model):
        slices = nn.ModuleList(model)
        slices.training = all(module.training for module in model)
        return slices
    for kind in (nn.Sequential, nn.ModuleList):
        if isinstance(model, kind) and type(model).forward is kind.forward:
            return model
    raise ValueError(
        f"the model is {brief(model)}; expected an nn.Sequential with its own forward, which says "
        "what each layer computes with, or a list of modules, each of which is a slice; write the "
        "model as one, or cut it with torch.fx"
    )


def _check(model: nn.Sequential | nn.ModuleList, num_slices: int, num_microbatches: int) -> None:
    is_cut = isinstance(model, nn.Sequential)
    kind = "Sequential" if is_cut else "ModuleList"
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    own = [*model._parameters, *model._buffers, *(name for name in hooks if getattr(model, name))]
    problems = [sharded_problem(model)]
    if own:
        problems.append(
            f"the {kind} itself has {own}, which would not be used; expected these in its layers "
            "only; put them into a layer, or register hooks on the OffloadModel"
        )
    if any(isinstance(module, ActivationWrapper) for module in model.modules()):
        problems.append(
            "a layer is, or has, a checkpoint wrapper; expected layers that keep what they save; "
            "pass checkpoint_activation=True instead"
        )
    check_all(*problems)
    check_waiting(model, dict(model.named_children()), dict(model.named_parameters()))
    check_count("num_microbatches", num_microbatches, least=1)
    if not len(model):
        raise ValueError("the model has no layers; expected at least one module in it")
    if is_cut and (count_problem("num_slices", num_slices, 1) or num_slices > len(model)):
        raise ValueError(
            f"num_slices is {brief(num_slices)}; expected 1 to {len(model)}, the number of "
            "layers, as an integer: each slice has at least one"
        )


def _split(inputs: tuple[Any, ...], num_microbatches: int) -> list[tuple[Any, ...]]:
    """Return the arguments of each microbatch; a value without a batch dimension goes to each."""
    if num_microbatches == 1:
        return [inputs]
    leaves, spec = tree_flatten(inputs)
    if hiding := sorted({type(leaf).__name__ for leaf in leaves if _hides_tensors(leaf)}):
        raise ValueError(
            f"inputs of type {', '.join(hiding)} have tensors inside that would not be cut into "
            "microbatches; expected tensors in tuples, lists and dicts, or num_microbatches=1"
        )
    sizes = sorted({len(leaf) for leaf in leaves if _has_batch(leaf)})
    if len(sizes) != 1:
        raise ValueError(
            f"the inputs have first dimensions {sizes}; expected tensors of one batch size, to cut "
            f"them into {num_microbatches} microbatches"
        )
    size = max(1, -(-sizes[0] // num_microbatches))
    num = max(1, -(-sizes[0] // size))  # an empty batch is one part, unchanged
    parts = [leaf.split(size) if _has_batch(leaf) else [leaf] * num for leaf in leaves]
    return [tree_unflatten(list(part), spec) for part in zip(*parts, strict=True)]


def _join(outputs: Sequence[Any]) -> Any:
    """Join the outputs of all microbatches, tensors along the first dimension."""
    if len(outputs) == 1:
        return outputs[0]
    flat, structures = zip(*map(tree_flatten, outputs), strict=True)
    if any(structure != structures[0] for structure in structures):
        raise ValueError(
            "the outputs of the microbatches differ in structure; take num_microbatches=1"
        )
    joined: list[Any] = []
    for leaves in zip(*flat, strict=True):
        first = leaves[0]
        is_tensor = isinstance(first, Tensor)
        if all(map(_has_batch, leaves)):
            joined.append(torch.cat(leaves))
        elif not is_tensor and all(leaf == first for leaf in leaves):
            joined.append(first)
        else:
            what = f"a tensor of {first.dim()} dimensions" if is_tensor else f"{first!r}"
            raise ValueError(
                f"an output of {len(leaves)} microbatches is {what}; expected tensors with a batch "
                "dimension, or the same plain value of each"
            )
    return tree_unflatten(joined, structures[0])


def _has_batch(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() >= 1


def _hides_tensors(leaf: Any) -> bool:
    inside = leaf.values() if isinstance(leaf, Mapping) else getattr(leaf, "__dict__", {}).values()
    return not isinstance(leaf, Tensor) and any(isinstance(value, Tensor) for value in inside)
