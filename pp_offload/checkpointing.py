"""Activation checkpointing of a model's layers, full or selective, with offload of what it keeps.

    ActivationCheckpointing.apply_activation_checkpointing_(
        ActivationCheckpointingVariants.FULL_ACTIVATION_CHECKPOINTING,
        layers_fqn="transformer.h",
        model=model,
        ac_fun_params=FullACParams(offload_inputs=True),
    )

Layers are wrapped by PyTorch's ``CheckpointWrapper``, so names in the state dict do not change.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn import Module, ModuleDict, ModuleList, Sequential

from pp_offload.backends import Backend
from pp_offload.config import OffloadConfig
from pp_offload.recompute import Recompute
from pp_offload.selective import OpPolicy
from pp_offload.stash import ActivationStash

CONTAINERS = (ModuleDict, ModuleList, Sequential)


class ActivationCheckpointingVariants(enum.Enum):
    """How much is checkpointed.

    Source: Modalities ``ActivationCheckpointingVariants``.
    """

    FULL_ACTIVATION_CHECKPOINTING = "full_activation_checkpointing"
    """Every layer: its inputs are kept, all else is computed again."""

    SELECTIVE_LAYER_ACTIVATION_CHECKPOINTING = "selective_layer_activation_checkpointing"
    """Every ``ac_freq``-th layer."""

    SELECTIVE_OP_ACTIVATION_CHECKPOINTING = "selective_op_activation_checkpointing"
    """Every layer, but outputs of chosen operators are kept as well."""


@dataclass(frozen=True, kw_only=True)
class FullACParams:
    """How a layer is checkpointed. The options from ``preserve_rng_state`` on are PyTorch's.

    Raises:
        ValueError: An option that the chosen way of checkpointing does not have.
    """

    offload_inputs: bool = False
    """What a checkpoint keeps of a layer's arguments goes to the tiers."""

    min_offload_size: int = 1024
    """Smaller tensors stay on the device. In bytes."""

    config: OffloadConfig = field(default_factory=OffloadConfig)
    """Which tiers, and how much of them; its options of groups and plans do not count."""

    use_reentrant: bool = False
    """PyTorch's older way, which runs backward inside backward."""

    preserve_rng_state: bool = True
    """Draw the same random numbers again, for dropout."""

    determinism_check: str = "default"
    """Compare shapes, dtypes and devices of what was computed again; ``"none"`` for nothing."""

    early_stop: bool = True
    """Compute again only as far as backward needs."""

    def __post_init__(self) -> None:
        if self.determinism_check not in ("default", "none"):
            raise ValueError(
                f'determinism_check is {self.determinism_check!r}; expected "default" or "none"'
            )
        if self.min_offload_size < 0:
            raise ValueError(
                f"min_offload_size is {self.min_offload_size}; expected at least 0 bytes"
            )

    def policy(self) -> OpPolicy | None:
        """Which operators' outputs are kept; None for none."""
        return None


@dataclass(frozen=True, kw_only=True)
class SelectiveLayerACParams(FullACParams):
    """Which layers are checkpointed, and how."""

    ac_freq: int
    """One layer in so many, the last of each so many."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.ac_freq, bool) or not isinstance(self.ac_freq, int) or self.ac_freq < 1:
            raise ValueError(
                f"ac_freq is {self.ac_freq!r}; expected an integer of at least 1, where 1 is every "
                "layer"
            )


@dataclass(frozen=True, kw_only=True)
class SelectiveOpACParams(FullACParams):
    """Of which operators outputs are kept, where, and how layers are checkpointed.

    Operators are named as in :attr:`ActivationCheckpointing.SAVE_DICT`, or like those:
    ``ops.aten.addmm.default`` is a linear layer with a bias.
    """

    save_ops_keys: Sequence[str] = ()
    """Outputs of these stay on the device."""

    offload_ops_keys: Sequence[str] = ()
    """Outputs of these go to the tiers."""

    recompute_every: Mapping[str, int] = field(default_factory=lambda: {MATMUL: 2})
    """Of the operators above, those of which every n-th call in a layer is computed again all the
    same. The reference does so with every second matrix product.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.save_ops_keys and not self.offload_ops_keys:
            raise ValueError(
                "save_ops_keys is empty; expected at least one operator here or in "
                f"offload_ops_keys, such as {', '.join(ActivationCheckpointing.SAVE_DICT)}; to "
                "compute all again use FULL_ACTIVATION_CHECKPOINTING"
            )
        twice = sorted(set(self.save_ops_keys) & set(self.offload_ops_keys))
        if twice:
            raise ValueError(f"{twice} are in save_ops_keys and offload_ops_keys; expected in one")
        if self.use_reentrant:
            raise ValueError(
                "use_reentrant is True, but only non-reentrant checkpoints can keep outputs of "
                "operators; leave it out"
            )
        for key, every in self.recompute_every.items():
            if every < 1:
                raise ValueError(f"recompute_every[{key!r}] is {every}; expected at least 1")
        self.policy()

    def policy(self) -> OpPolicy | None:
        """Which operators' outputs are kept."""
        offload = frozenset(map(operator, self.offload_ops_keys))
        for op in offload:
            if any(value.alias_info is not None for value in op._schema.returns):
                raise ValueError(
                    f"offload_ops_keys has {_key(op)}, which returns memory of its arguments; "
                    "expected operators with outputs of their own"
                )
        every = {operator(key): number for key, number in self.recompute_every.items()}
        return OpPolicy(frozenset(map(operator, self.save_ops_keys)), offload, every)


class ActivationCheckpointedModelConfig:
    """The parameters under the names they have in Modalities."""

    FullACParams = FullACParams
    SelectiveLayerACParams = SelectiveLayerACParams
    SelectiveOpACParams = SelectiveOpACParams


MATMUL = "ops.aten.mm.default"

_PARAMS: dict[ActivationCheckpointingVariants, type[FullACParams]] = {
    ActivationCheckpointingVariants.FULL_ACTIVATION_CHECKPOINTING: FullACParams,
    ActivationCheckpointingVariants.SELECTIVE_LAYER_ACTIVATION_CHECKPOINTING: (
        SelectiveLayerACParams
    ),
    ActivationCheckpointingVariants.SELECTIVE_OP_ACTIVATION_CHECKPOINTING: SelectiveOpACParams,
}


class ActivationCheckpointing:
    """Applies activation checkpointing to the layers of a model, in place.

    Source: Modalities ``ActivationCheckpointing``.
    """

    SAVE_DICT: dict[str, OpOverload] = {
        MATMUL: torch.ops.aten.mm.default,
        "ops.aten._scaled_dot_product_efficient_attention.default": (
            torch.ops.aten._scaled_dot_product_efficient_attention.default
        ),
        "ops.aten._scaled_dot_product_flash_attention.default": (
            torch.ops.aten._scaled_dot_product_flash_attention.default
        ),
        "ops._c10d_functional.reduce_scatter_tensor.default": (
            torch.ops._c10d_functional.reduce_scatter_tensor.default
        ),
        "ops.aten.max.default": torch.ops.aten.max.default,
    }
    """Operators that are dear to compute, or whose result must not change, by name."""

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
            ac_variant: How much is checkpointed.
            layers_fqn: Name in the model of the ModuleDict, ModuleList or Sequential of layers.
            model: Its forward begins a microbatch; any number may be in flight.
            ac_fun_params: :class:`FullACParams`, :class:`SelectiveLayerACParams` or
                :class:`SelectiveOpACParams`, as the variant wants; or any object with such
                attributes.
            backend: Device to work on; the accelerator where there is one, else the CPU.

        Returns:
            What was done so far by these layers: its ``counts``, and ``stash.statistics()``.

        Raises:
            ValueError: The variant is unknown, the parameters are not for it, the layers are not
                there or no container, or they are checkpointed already. The model is as before.
        """
        params = _params(ac_variant, ac_fun_params)
        layers = _container(model, layers_fqn)
        recompute = _recompute(params, backend)
        every = params.ac_freq if isinstance(params, SelectiveLayerACParams) else 1
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
        backend: Device to work on; the accelerator where there is one, else the CPU.

    Returns:
        What was done so far by these modules.

    Raises:
        ValueError: The model is no FSDP1 model, or has no module of a class.

    Source: Modalities ``apply_activation_checkpointing_fsdp1_inplace``.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    if not isinstance(model, FullyShardedDataParallel):
        raise ValueError(
            f"model is a {type(model).__name__}; expected a FullyShardedDataParallel; for others "
            "use ActivationCheckpointing.apply_activation_checkpointing_"
        )
    found = {type(module).__name__: type(module) for module in model.modules()}
    missing = sorted(set(activation_checkpointing_modules) - set(found))
    if missing:
        raise ValueError(
            f"the model has no module of class {', '.join(missing)}; expected some of "
            f"{', '.join(sorted(found))}"
        )
    wanted = [found[name] for name in activation_checkpointing_modules]
    recompute = _recompute(ac_fun_params or FullACParams(), backend)
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=partial(checkpoint_wrapper, checkpoint_fn=recompute),
        check_fn=partial(
            is_module_to_apply_activation_checkpointing, activation_checkpointing_modules=wanted
        ),
    )
    _follow(model, recompute)
    return recompute


def is_module_to_apply_activation_checkpointing(
    submodule: Module, activation_checkpointing_modules: list[type]
) -> bool:
    """Whether ``submodule`` is of one of these classes.

    Source: Modalities.
    """
    return isinstance(submodule, tuple(activation_checkpointing_modules))


def operator(key: str) -> OpOverload:
    """The operator of this name.

    Raises:
        ValueError: There is none.
    """
    found: Any = torch
    for part in key.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, OpOverload):
        raise ValueError(
            f"unknown operator {key!r}; expected one of "
            f"{', '.join(ActivationCheckpointing.SAVE_DICT)}, or the name of another with its "
            "overload, such as ops.aten.addmm.default"
        )
    return found


def _key(op: OpOverload) -> str:
    return f"ops.{op}"


def _params(variant: object, given: Any) -> FullACParams:
    """What the variant wants to know, of ours or of an object with such attributes."""
    if variant not in _PARAMS:
        known = ", ".join(str(one) for one in ActivationCheckpointingVariants)
        raise ValueError(f"unknown variant {variant!r}; expected one of {known}")
    wanted = _PARAMS[variant]  # type: ignore[index]
    if type(given) is wanted:
        return given
    if isinstance(given, FullACParams):
        raise ValueError(
            f"ac_fun_params is a {type(given).__name__}; expected {wanted.__name__} for {variant}"
        )
    names = [one.name for one in fields(wanted) if hasattr(given, one.name)]
    if wanted is SelectiveLayerACParams and "ac_freq" not in names:
        raise ValueError(f"ac_fun_params is {given!r}, without ac_freq; expected {wanted.__name__}")
    return wanted(**{name: getattr(given, name) for name in names})


def _container(model: Module, layers_fqn: str) -> Module:
    try:
        layers = model.get_submodule(layers_fqn)
    except AttributeError as error:
        known = [name for name, module in model.named_modules() if isinstance(module, CONTAINERS)]
        raise ValueError(
            f"layers_fqn is {layers_fqn!r}, but {error}; containers of this model: {known}"
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


def _recompute(params: FullACParams, backend: Backend | None) -> Recompute:
    policy = params.policy()
    stash = None
    if params.offload_inputs or (policy is not None and policy.offload):
        stash = ActivationStash(
            "checkpoints", params.config, min_offload_size=params.min_offload_size, backend=backend
        )
    return Recompute(
        stash,
        policy=policy,
        offload_inputs=params.offload_inputs,
        use_reentrant=params.use_reentrant,
        preserve_rng_state=params.preserve_rng_state,
        determinism_check=params.determinism_check,
        early_stop=params.early_stop,
    )


def _follow(model: Module, recompute: Recompute) -> None:
    """Every forward of ``model`` is a microbatch; its parameters and buffers stay."""
    if recompute.stash is None:
        return
    recompute.stash.keep_module(model)
    model.register_forward_pre_hook(partial(_begin, recompute))


def _begin(recompute: Recompute, module: Module, inputs: Any) -> None:
    recompute.begin()
