"""Activation checkpointing of a model's layers, full or selective, with offload of kept tensors.

Layers are wrapped by PyTorch's ``CheckpointWrapper``, so names in the state dict do not change.

    recompute_layers(model, ["layers.0", "layers.4"])  # as a whole
    block = checkpoint_wrapper(block, offload_inputs=True)  # one module
    y = checkpoint(function, x, offload_inputs=True)  # one call
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.nn import Module, ModuleDict, ModuleList, Sequential

from pp_offload._checkpoint.options import (
    SAVE_DICT,
    ActivationCheckpointedModelConfig,
    ActivationCheckpointingVariants,
    FullACParams,
    SelectiveLayerACParams,
    SelectiveOpACParams,
    params_for,
)
from pp_offload._checkpoint.recompute import Recompute
from pp_offload._checkpoint.recomputed_layers import RecomputedLayers, recompute_layers
from pp_offload._checkpoint.shared import (
    CheckpointedModule,
    checkpoint,
    checkpoint_function,
    checkpoint_wrapper,
)
from pp_offload._common.checks import brief, check_kind
from pp_offload._common.torch_private import CheckpointWrapper, apply_activation_checkpointing
from pp_offload.backends import Backend

CONTAINERS = (ModuleDict, ModuleList, Sequential)


class ActivationCheckpointing:
    """Activation checkpointing of the layers of a model, applied in place.

    Source: Modalities ``ActivationCheckpointing``.
    """

    SAVE_DICT = SAVE_DICT
    """Usual operators whose outputs are kept, by name."""

    @staticmethod
    def apply_activation_checkpointing_(
        ac_variant: ActivationCheckpointingVariants,
        layers_fqn: str,
        model: Module,
        ac_fun_params: Any,
        *,
        backend: Backend | None = None,
    ) -> Recompute:
        """Wrap the layers of ``model``.

        Args:
            ac_variant: How to checkpoint: a variant of ours, its value, or Modalities' member.
            layers_fqn: Name in the model of the ModuleDict, ModuleList or Sequential of layers.
            model: Its forward begins a microbatch; any number may be in flight.
            ac_fun_params: :class:`FullACParams`, :class:`SelectiveLayerACParams` or
                :class:`SelectiveOpACParams`, to match the variant; or a mapping of such options,
                or any object with such attributes.
            backend: Device to work on; the accelerator if present, else the CPU.

        Returns:
            The object that runs these layers. It has ``counts`` of its work so far, and, with
            offload, ``stash.statistics()``.

        Raises:
            ValueError: The variant, the parameters or the layers cannot be right, or the layers are
                checkpointed already. The model is unchanged.
            TypeError: ``model`` is no module, ``layers_fqn`` no name, or ``backend`` no backend.
        """
        params = params_for(ac_variant, ac_fun_params)
        layers = _container(model, layers_fqn)
        recompute = Recompute(params, backend)
        every = params.ac_freq if isinstance(params, SelectiveLayerACParams) else 1
        if every > len(layers._modules):
            raise ValueError(
                f"ac_freq is {every}, but {layers_fqn!r} has {len(layers._modules)} layers; "
                "expected at most that: otherwise no layer is checkpointed"
            )
        wrapped: dict[Module, Module] = {}
        for number, (name, layer) in enumerate(list(layers._modules.items()), start=1):
            if layer is not None and number % every == 0:
                if layer not in wrapped:
                    wrapped[layer] = CheckpointWrapper(layer, checkpoint_fn=recompute)
                layers.register_module(name, wrapped[layer])
        _follow(model, recompute)
        return recompute


def apply_activation_checkpointing_fsdp1_inplace(
    model: Module,
    activation_checkpointing_modules: list[str],
    *,
    ac_fun_params: Any = None,
    backend: Backend | None = None,
) -> Recompute:
    """Wrap modules of some classes in a model that FSDP1 has wrapped.

    Args:
        model: A ``FullyShardedDataParallel``; for FSDP2 use :class:`ActivationCheckpointing`.
        activation_checkpointing_modules: Names of classes, such as ``GPT2Block``.
        ac_fun_params: :class:`FullACParams` or :class:`SelectiveOpACParams`; the former when None.
        backend: Device to work on; the accelerator if present, else the CPU.

    Returns:
        The object that runs these modules; see :class:`ActivationCheckpointing`.

    Raises:
        ValueError: The model is no FSDP1 model, has no module of a class, or has checkpoints
            already; or the parameters are of another variant.

    Source: Modalities ``apply_activation_checkpointing_fsdp1_inplace``.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    if not isinstance(model, FullyShardedDataParallel):
        raise ValueError(
            f"model is a {type(model).__name__}; expected a FullyShardedDataParallel; for others "
            "use ActivationCheckpointing.apply_activation_checkpointing_"
        )
    names = activation_checkpointing_modules
    if isinstance(names, str) or not all(isinstance(name, str) for name in names) or not names:
        raise ValueError(
            f"activation_checkpointing_modules is {brief(names)}; expected a list of names of "
            'classes, such as ["GPT2Block"]'
        )
    if any(isinstance(module, CheckpointWrapper) for module in model.modules()):
        raise ValueError("the model has checkpoints already; expected to be applied once")
    classes = {type(module) for module in model.modules()}
    wanted = [kind for kind in classes if kind.__name__ in names]
    missing = sorted(set(names) - {kind.__name__ for kind in wanted})
    if missing:
        raise ValueError(
            f"the model has no module of class {', '.join(missing)}; expected some of "
            f"{', '.join(sorted({kind.__name__ for kind in classes}))}"
        )
    variant = ActivationCheckpointingVariants.FULL_ACTIVATION_CHECKPOINTING
    if isinstance(ac_fun_params, SelectiveOpACParams):
        variant = ActivationCheckpointingVariants.SELECTIVE_OP_ACTIVATION_CHECKPOINTING
    params = params_for(variant, FullACParams() if ac_fun_params is None else ac_fun_params)
    recompute = Recompute(params, backend)
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=partial(CheckpointWrapper, checkpoint_fn=recompute),
        check_fn=lambda module: is_module_to_apply_activation_checkpointing(module, wanted),
    )
    _follow(model, recompute)
    return recompute


def is_module_to_apply_activation_checkpointing(
    submodule: Module, activation_checkpointing_modules: list[type]
) -> bool:
    """Whether ``submodule`` is an instance of one of these classes.

    Source: Modalities.
    """
    return isinstance(submodule, tuple(activation_checkpointing_modules))


def _container(model: Module, layers_fqn: str) -> Module:
    check_kind("model", model, Module, "an nn.Module")
    check_kind("layers_fqn", layers_fqn, str, "the name of a container of layers in the model")
    try:
        layers = model.get_submodule(layers_fqn)
    except AttributeError as error:
        names = [name for name, module in model.named_modules() if isinstance(module, CONTAINERS)]
        raise ValueError(
            f"layers_fqn is {layers_fqn!r}, but {error}; containers of this model: {names}"
        ) from error
    if not isinstance(layers, CONTAINERS):
        raise ValueError(
            f"layers_fqn is {layers_fqn!r}, a {type(layers).__name__}; expected a ModuleDict, "
            "ModuleList or Sequential of layers"
        )
    if any(isinstance(layer, CheckpointWrapper) for layer in layers.children()):
        raise ValueError(
            f"layers of {layers_fqn!r} are checkpointed already; expected to be applied once"
        )
    return layers


def _follow(model: Module, recompute: Recompute) -> None:
    """Make each forward of ``model`` a microbatch; keep its parameters and buffers in place."""
    if recompute.stash is not None:
        recompute.stash.residents.add_module(model)
        model.register_forward_pre_hook(partial(_begin, recompute))


def _begin(recompute: Recompute, module: Module, inputs: Any) -> None:
    recompute.check_idle()
    recompute.begin()


__all__ = [
    "ActivationCheckpointedModelConfig",
    "ActivationCheckpointing",
    "ActivationCheckpointingVariants",
    "CheckpointedModule",
    "FullACParams",
    "RecomputedLayers",
    "SelectiveLayerACParams",
    "SelectiveOpACParams",
    "apply_activation_checkpointing_fsdp1_inplace",
    "checkpoint",
    "checkpoint_function",
    "checkpoint_wrapper",
    "is_module_to_apply_activation_checkpointing",
    "recompute_layers",
]
