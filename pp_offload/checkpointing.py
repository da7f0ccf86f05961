"""Activation checkpointing of a model's layers, full or selective, with offload of kept tensors.

Layers are wrapped by PyTorch's ``CheckpointWrapper``, so names in the state dict do not change.

    recompute_layers(model, ["layers.0", "layers.4"])  # as a whole
    block = checkpoint_wrapper(block, offload_inputs=True)  # one module
    y = checkpoint(function, x, offload_inputs=True)  # one call
    run = checkpoint_function(offload_inputs=True)  # the engine of both, for equal options
    y = run(function, x)
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

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
from pp_offload._checkpoint.recompute import Recompute, shared_for
from pp_offload._common.checks import brief, check_flag, check_kind
from pp_offload._common.torch_private import CheckpointWrapper, apply_activation_checkpointing
from pp_offload.backends import Backend
from pp_offload.config import OffloadConfig

CONTAINERS = (ModuleDict, ModuleList, Sequential)

INSTEAD = {
    "context_fn": "name operators in checkpoint_function(offload_ops_keys=[...])",
    "debug": "call torch.utils.checkpoint.checkpoint to look for the operator that differs",
}
"""Arguments of PyTorch's checkpoint that would reach the function, and what to do instead."""


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


# Named layers, as a whole


class RecomputedLayers(AbstractContextManager["RecomputedLayers"]):
    """Undoes :func:`recompute_layers`; ``recompute.counts`` say what was done so far."""

    def __init__(self, model: Module, names: Collection[str], recompute: Recompute) -> None:
        self.recompute, self.names, self._model = recompute, tuple(names), model
        # Parts before what is around them, whose wrapper would take them from their place.
        self._layers = {name: model.get_submodule(name) for name in sorted(names, reverse=True)}
        for name, layer in self._layers.items():
            model.set_submodule(name, CheckpointWrapper(layer, checkpoint_fn=recompute))

    def remove(self) -> None:
        while self._layers:
            self._model.set_submodule(*self._layers.popitem())

    def __exit__(self, *error: object) -> None:
        self.remove()


def recompute_layers(
    model: Module, names: Collection[str], *, preserve_rng_state: bool = True
) -> RecomputedLayers:
    """Have backward recompute these layers as a whole: groups in them do nothing.

    Call this before FSDP2 shards the model, and before a schedule is attached. An offload plan
    lists the layers: ``recompute_layers(stage, plan.rank(0).recomputed[0])``.

    Args:
        model: Changed in place. Names in its state dict do not change.
        names: Names of modules in it. A group begins and ends inside one of them, or outside.
        preserve_rng_state: Draw the same random numbers again, for dropout.

    Returns:
        A handle to undo it; also a context manager.

    Raises:
        TypeError: ``model`` is no module, or ``names`` are no names.
        ValueError: A module does not exist, or is in a checkpoint already. The model is unchanged.
    """
    check_kind("model", model, Module, "an nn.Module")
    if isinstance(names, str) or not isinstance(names, Collection):
        raise TypeError(f"names is {brief(names)}, expected a list of names of modules")
    for name in names:
        check_kind("a name of names", name, str, "the name of a module")
        try:
            model.get_submodule(name)
        except AttributeError as error:
            raise ValueError(f"there is no module {name!r} in the model: {error}") from error
        if not name or isinstance(model, CheckpointWrapper) or is_inside_recomputed(model, name):
            raise ValueError(
                f"{name!r} has a checkpoint already, or is the model; expected neither"
            )
    params = FullACParams(preserve_rng_state=preserve_rng_state)
    return RecomputedLayers(model, names, Recompute(params, warns_of_groups=False))


def is_recomputed(model: Module, name: str) -> bool:
    """Whether this module is wrapped, as by :func:`recompute_layers`."""
    try:
        return isinstance(model.get_submodule(name), CheckpointWrapper)
    except AttributeError:
        return False


def is_inside_recomputed(model: Module, name: str) -> bool:
    """Whether a module is such a layer, or in one, so that its groups never run."""
    parts = name.split(".")
    return any(is_recomputed(model, ".".join(parts[:num])) for num in range(1, len(parts) + 1))


# Single calls and modules


def checkpoint_function(*, backend: Backend | None = None, **options: Any) -> Recompute:
    """Return a function that runs other functions under a checkpoint with these options.

    The result fits where such a function is expected: ``f(function, *args, **kwargs)`` returns
    the result of ``function``, which runs again in backward.

    Args:
        backend: Device to work on; the accelerator if present, else the CPU. Make a backend once:
            each has an engine of its own, which lives as long as the backend.
        options: Options of :class:`FullACParams`, or of :class:`SelectiveOpACParams` if operators
            are named.

    Returns:
        The same object for equal options and the same backend. It has ``counts`` of its work so
        far, and, if anything is offloaded, ``stash.statistics()``.

    Raises:
        ValueError: An option cannot be right or does not exist; the message names near ones.
        TypeError: ``backend`` is no backend.
    """
    is_by_op = bool(SelectiveOpACParams.__annotations__.keys() & options.keys())
    kind = SelectiveOpACParams if is_by_op else FullACParams
    return shared_for(kind(**options), backend)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = False,
    preserve_rng_state: bool = True,
    determinism_check: str = "default",
    early_stop: bool = True,
    offload_inputs: bool = False,
    min_offload_size: int = 1024,
    config: OffloadConfig | None = None,
    backend: Backend | None = None,
    **kwargs: Any,
) -> Any:
    """Call ``function``, keep only its inputs, and have backward run it again.

    Args:
        function: A module, or any function of tensors. Without grad it is called plainly.
        args, kwargs: Arguments of ``function``. Tensors are found in containers, too.
        use_reentrant, preserve_rng_state, determinism_check, early_stop: PyTorch's options.
        offload_inputs, min_offload_size, config: See :class:`FullACParams`.
        backend: Device to work on; the accelerator if present, else the CPU.

    Returns:
        The result of ``function``.

    Raises:
        ValueError: A value cannot be right, or reentrant checkpoints do not have the option.
        TypeError: ``function`` cannot be called, or ``config`` or ``backend`` is none.

    Source: PyTorch ``torch.utils.checkpoint.checkpoint``.
    """
    if not callable(function):
        raise TypeError(f"function is {brief(function)}, expected a module or another callable")
    for name in INSTEAD.keys() & kwargs.keys():
        raise ValueError(f"checkpoint has no {name}, expected none; {INSTEAD[name]}")
    run = checkpoint_function(
        use_reentrant=use_reentrant,
        preserve_rng_state=preserve_rng_state,
        determinism_check=determinism_check,
        early_stop=early_stop,
        offload_inputs=offload_inputs,
        min_offload_size=min_offload_size,
        config=OffloadConfig() if config is None else config,
        backend=backend,
    )
    return run(function, *args, **kwargs)


class CheckpointedModule(CheckpointWrapper):
    """A module that backward recomputes. :func:`checkpoint_wrapper` makes these."""

    @property
    def recompute(self) -> Recompute:
        """Engine with ``params``, ``counts`` and, with offload, ``stash.statistics()``."""
        return cast(Recompute, cast(Any, self.checkpoint_fn).func)  # the function is a partial

    def extra_repr(self) -> str:
        params = self.recompute.params
        names = [name for name in ("offload_inputs", "use_reentrant") if getattr(params, name)]
        return ", ".join(f"{name}=True" for name in names)


def checkpoint_wrapper(
    module: Module, offload_to_cpu: bool = False, *, backend: Backend | None = None, **options: Any
) -> CheckpointedModule:
    """Have backward recompute ``module``, and offload its inputs if wanted.

    Names in the state dict do not change. Attributes are found through the wrapper, which may be
    copied and, without a ``backend``, pickled.

    Args:
        module: Not changed. Without grad it is called plainly.
        offload_to_cpu: ``offload_inputs`` by fairscale's name.
        backend: Device to work on; the accelerator if present, else the CPU.
        options: Options of :func:`checkpoint_function`.

    Returns:
        The wrapper, to put in the place of ``module``.

    Raises:
        ValueError: ``module`` is wrapped already, or an option cannot be right or does not exist.
        TypeError: ``module`` is no module, or ``backend`` no backend.

    Source: fairscale ``checkpoint_wrapper``; PyTorch ``checkpoint_wrapper``.
    """
    check_kind("module", module, Module, "an nn.Module")
    check_flag("offload_to_cpu", offload_to_cpu)
    if isinstance(module, CheckpointWrapper):
        raise ValueError(
            f"module is a {type(module).__name__}, which is computed again already; expected a "
            "module without: twice costs time and frees nothing"
        )
    if offload_to_cpu:
        options = {"offload_inputs": True, **options}
    recompute = checkpoint_function(backend=backend, **options)
    if recompute.stash is not None:
        recompute.stash.residents.add_module(module)
    return CheckpointedModule(module, checkpoint_fn=recompute)


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
