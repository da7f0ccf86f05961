"""Some layers of a model, recomputed as a whole in backward.

handle = recompute_layers(model, ["layers.0", "layers.4"])
...
handle.remove()
"""

from __future__ import annotations

from collections.abc import Collection

from torch.nn import Module

from pp_offload._checkpoint.options import FullACParams
from pp_offload._checkpoint.recompute import Recompute
from pp_offload._common.checks import brief, check_kind
from pp_offload._common.torch_private import CheckpointWrapper


class RecomputedLayers:
    """Undoes :func:`recompute_layers`; ``recompute.counts`` say what was done so far."""

    def __init__(self, model: Module, names: Collection[str], recompute: Recompute) -> None:
        self.recompute = recompute
        self.names = tuple(names)
        self._model = model
        self._layers = {name: model.get_submodule(name) for name in names}
        for name, layer in self._layers.items():
            model.set_submodule(name, CheckpointWrapper(layer, checkpoint_fn=recompute))

    def remove(self) -> None:
        while self._layers:
            self._model.set_submodule(*self._layers.popitem())

    def __enter__(self) -> RecomputedLayers:
        return self

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
        ValueError: A module does not exist, is named twice, is a part of another one, or has
            checkpoints already. The model is unchanged.
    """
    check_kind("model", model, Module, "an nn.Module")
    if isinstance(names, str) or not isinstance(names, Collection):
        raise TypeError(f"names is {brief(names)}, expected a list of names of modules")
    for name in names:
        _check_layer(model, name, names)
    if len(set(names)) != len(names):
        raise ValueError(f"names is {list(names)}, expected each name once")
    params = FullACParams(preserve_rng_state=preserve_rng_state)
    recompute = Recompute(params, warns_of_groups=False)
    return RecomputedLayers(model, names, recompute)


def is_recomputed(model: Module, name: str) -> bool:
    """Whether :func:`recompute_layers` was called for this module."""
    try:
        layer = model.get_submodule(name)
    except AttributeError:
        return False
    partial = layer.checkpoint_fn if isinstance(layer, CheckpointWrapper) else None
    recompute = getattr(partial, "func", None)
    return isinstance(recompute, Recompute) and not recompute.warns_of_groups


def is_inside_recomputed(model: Module, name: str) -> bool:
    """Whether a module is such a layer, or in one, so that its groups never run."""
    parts = name.split(".")
    return any(is_recomputed(model, ".".join(parts[:num])) for num in range(1, len(parts) + 1))


def _check_layer(model: Module, name: str, names: Collection[str]) -> None:
    check_kind("a name of names", name, str, "the name of a module")
    try:
        layer = model.get_submodule(name)
    except AttributeError as error:
        raise ValueError(f"there is no module {name!r} in the model: {error}") from error
    outer = [prefix for prefix in names if name.startswith(f"{prefix}.")]
    if layer is model or outer:
        where = f"is a part of {outer[0]!r}" if outer else "is the model itself"
        raise ValueError(f"{name!r} {where}, expected modules of which none is in another")
    parts = name.split(".")
    around = [model.get_submodule(".".join(parts[:num])) for num in range(len(parts))]
    if any(isinstance(module, CheckpointWrapper) for module in (*around, *layer.modules())):
        raise ValueError(f"{name!r} has a checkpoint already, expected none; choose one of the two")
