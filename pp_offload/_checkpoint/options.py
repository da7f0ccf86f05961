"""Options of layers' checkpoints, and their checks.

params = params_for(variant, SelectiveOpACParams(save_ops_keys=["ops.aten.mm.default"]))
params.kept_ops()
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from pp_offload._common.checks import (
    brief,
    check_all,
    check_count,
    check_kind,
    check_names,
    count_problem,
    flag_problem,
    takes_options_by_name,
)
from pp_offload._common.torch_private import OpOverload
from pp_offload.config import OffloadConfig, check_config

MATMUL = "ops.aten.mm.default"

USUAL_OPS = (
    MATMUL,
    "ops.aten._scaled_dot_product_efficient_attention.default",
    "ops.aten._scaled_dot_product_flash_attention.default",
    "ops._c10d_functional.reduce_scatter_tensor.default",
    "ops.aten.max.default",
)
"""Names of operators that are expensive to compute, or whose result must not change."""


class ActivationCheckpointingVariants(enum.Enum):
    """Which layers and operators are checkpointed.

    Source: Modalities ``ActivationCheckpointingVariants``.
    """

    FULL_ACTIVATION_CHECKPOINTING = "full_activation_checkpointing"
    """Every layer: its inputs are kept, everything else is recomputed."""

    SELECTIVE_LAYER_ACTIVATION_CHECKPOINTING = "selective_layer_activation_checkpointing"
    """Every ``ac_freq``-th layer."""

    SELECTIVE_OP_ACTIVATION_CHECKPOINTING = "selective_op_activation_checkpointing"
    """Every layer, but outputs of chosen operators are kept, too."""


@takes_options_by_name
@dataclass(frozen=True, kw_only=True)
class FullACParams:
    """How a layer is checkpointed. The options from ``use_reentrant`` on are PyTorch's.

    Args:
        offload_inputs: Offload the tensors that a checkpoint keeps of a layer's arguments to the
            tiers.
        min_offload_size: In bytes. Smaller tensors stay on the device.
        config: Tiers, and limits on them. Options about groups have no effect.
        use_reentrant: Use PyTorch's older checkpoints, which run backward inside backward.
        preserve_rng_state: Draw the same random numbers again, for dropout. Modalities does not.
        determinism_check: Compare shapes, dtypes and devices of recomputed tensors; ``"none"``
            compares nothing.
        early_stop: Stop recomputing when backward has all it needs.

    Raises:
        ValueError: A value cannot be right, or reentrant checkpoints do not have the option.
    """

    offload_inputs: bool = False
    min_offload_size: int = 1024
    config: OffloadConfig = field(default_factory=OffloadConfig)
    use_reentrant: bool = False
    preserve_rng_state: bool = True
    determinism_check: str = "default"
    early_stop: bool = True

    def __post_init__(self) -> None:
        flags = ("offload_inputs", "use_reentrant", "preserve_rng_state", "early_stop")
        check_all(
            *(flag_problem(name, getattr(self, name)) for name in flags),
            count_problem("min_offload_size", self.min_offload_size, 0, "bytes"),
        )
        check_config(self.config)
        if self.determinism_check not in ("default", "none"):
            raise ValueError(
                f'determinism_check is {self.determinism_check!r}; expected "default" or "none"'
            )
        if self.use_reentrant and not (self.early_stop and self.determinism_check == "default"):
            raise ValueError(
                "use_reentrant is True, with early_stop or determinism_check; expected one or the "
                "other: reentrant checkpoints run all again, and compare nothing"
            )

    def kept_ops(self) -> dict[OpOverload, int | None]:
        """Return operators whose outputs are kept, with n where every n-th call is recomputed."""
        return {}

    def offloaded_ops(self) -> list[OpOverload]:
        """Return the kept operators whose outputs go to the tiers."""
        return []


@takes_options_by_name
@dataclass(frozen=True, kw_only=True)
class SelectiveLayerACParams(FullACParams):
    """Which layers are checkpointed, and how.

    Args:
        ac_freq: Checkpoint every ``ac_freq``-th layer: the last of each ``ac_freq`` in order.
    """

    ac_freq: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("ac_freq", self.ac_freq, least=1, unit="1 is every layer")


@takes_options_by_name
@dataclass(frozen=True, kw_only=True)
class SelectiveOpACParams(FullACParams):
    """Which operators' outputs are kept, and where; and how layers are checkpointed.

    Operators are named as in :data:`USUAL_OPS`, or like those: ``ops.aten.addmm.default`` is a
    linear layer with a bias.

    Args:
        save_ops_keys: Operators whose outputs stay on the device.
        offload_ops_keys: Operators whose outputs go to the tiers.
        recompute_every: For some of these operators, n: every n-th call in a layer is recomputed
            nevertheless. Modalities recomputes every second matrix product, that is ``aten.mm``: a
            linear layer without a bias.
    """

    save_ops_keys: Sequence[str] = ()
    offload_ops_keys: Sequence[str] = ()
    recompute_every: Mapping[str, int] = field(default_factory=lambda: {MATMUL: 2})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("save_ops_keys", "offload_ops_keys"):
            keys = getattr(self, name)
            is_list = isinstance(keys, list | tuple | set | frozenset)
            if not is_list or not all(isinstance(key, str) for key in keys):
                raise ValueError(f"{name} is {brief(keys)}; expected a list of names")
        check_kind("recompute_every", self.recompute_every, Mapping, "a mapping of names to counts")
        if not self.save_ops_keys and not self.offload_ops_keys:
            raise ValueError(
                "save_ops_keys is empty; expected at least one operator here or in "
                f"offload_ops_keys, such as {', '.join(USUAL_OPS)}; to "
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
            check_count(f"recompute_every[{key!r}]", every, least=1)
        self.kept_ops()
        for op in self.offloaded_ops():
            if any(value.alias_info is not None for value in op._schema.returns):
                raise ValueError(
                    f"offload_ops_keys has ops.{op}, which returns memory of its arguments; "
                    "expected operators with outputs of their own"
                )

    def kept_ops(self) -> dict[OpOverload, int | None]:
        every = {operator(key): number for key, number in self.recompute_every.items()}
        ops = map(operator, (*self.save_ops_keys, *self.offload_ops_keys))
        return {op: every.get(op) for op in ops if every.get(op) != 1}

    def offloaded_ops(self) -> list[OpOverload]:
        return list(map(operator, self.offload_ops_keys))


class ActivationCheckpointedModelConfig:
    """Parameters under the names they have in Modalities."""

    FullACParams = FullACParams
    SelectiveLayerACParams = SelectiveLayerACParams
    SelectiveOpACParams = SelectiveOpACParams


KINDS = (FullACParams, SelectiveLayerACParams, SelectiveOpACParams)  # of the variants, in order


def params_for(variant: object, given: Any) -> FullACParams:
    """Return the parameters of a variant, of which another library's enum may have the value or
    name. They may be ours, a mapping of options, or an object with such attributes.
    """
    kind = _params_type(variant)
    if type(given) is kind:
        return given
    is_mapping = isinstance(given, Mapping)
    if isinstance(given, FullACParams) or not (is_mapping or hasattr(given, "__dict__")):
        raise ValueError(
            f"ac_fun_params is {brief(given)}; expected {kind.__name__} for {variant}, or a "
            "mapping or an object with such options"
        )
    names = [option.name for option in fields(kind)]
    if is_mapping:
        check_names(given, names, "ac_fun_params")
        values = dict(given)
    else:
        values = {name: getattr(given, name) for name in names if hasattr(given, name)}
    if kind is SelectiveLayerACParams and "ac_freq" not in values:
        raise ValueError(
            f"ac_fun_params is {brief(given)}, without ac_freq; expected {kind.__name__}"
        )
    return kind(**values)


def _params_type(variant: object) -> type[FullACParams]:
    spellings = (variant.value, variant.name) if isinstance(variant, enum.Enum) else (variant,)
    for member, kind in zip(ActivationCheckpointingVariants, KINDS, strict=True):
        if {member.value, member.name}.intersection(map(str, spellings)):
            return kind
    names = ", ".join(f"{each} or {each.value!r}" for each in ActivationCheckpointingVariants)
    raise ValueError(f"unknown variant {brief(variant)}; expected one of {names}")


def operator(key: str) -> OpOverload:
    """Return the operator of this name; raise a ValueError if there is none."""
    value: Any = torch
    check_kind("the name of an operator", key, str, f"a str, such as {MATMUL!r}")
    for part in key.split("."):
        value = getattr(value, part, None)
    if not isinstance(value, OpOverload):
        raise ValueError(
            f"unknown operator {key!r}; expected one of {', '.join(USUAL_OPS)}, or the name of "
            "another with its overload, such as ops.aten.addmm.default"
        )
    return value


SAVE_DICT = {key: operator(key) for key in USUAL_OPS}
