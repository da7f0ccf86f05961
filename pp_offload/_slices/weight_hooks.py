"""Hooks of layers that compute a weight, from parameters which wait on the host.

NOTE [ Hooks that compute a weight ]
    The older norms of PyTorch, and its pruning, compute a weight in a forward pre-hook. One of a
    module inside of a layer runs in the layer's forward, where parameters are on the device. One of
    the layer itself runs before that, and would compute from what is on the host. It cannot run
    again in the forward, for a spectral norm goes on by one step each time. A parametrization has
    no hook: it computes when the forward asks.

Call pattern:

    check_hooks({"layers.0": layer}, waiting)
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

from torch.nn import Module, Parameter

ADVICE = {
    "torch.nn.utils.spectral_norm": "use torch.nn.utils.parametrizations.spectral_norm",
    "torch.nn.utils.weight_norm": "use torch.nn.utils.parametrizations.weight_norm",
    "torch.nn.utils.prune": "make pruning permanent with torch.nn.utils.prune.remove()",
}
"""What to do without a hook, by the module of its class. Importing all of them takes time."""

SUFFIXES = ("_orig", "_g", "_v")
"""With them, a weight's name is that of a parameter which such a hook computes it from."""


def check_hooks(layers: Mapping[str, Module], waiting: Container[Parameter]) -> None:
    """Raise if a hook of a layer itself computes a weight from parameters that wait on the host.

    Args:
        layers: By name.
        waiting: The parameters that wait.

    Raises:
        ValueError: One does. See NOTE [ Hooks that compute a weight ].
    """
    found = [
        (f"{name!r} has {kind} on its {weight!r}", ADVICE[kind])
        for name, layer in layers.items()
        for kind, weight in _weights(layer, waiting)
    ]
    if found:
        instead = dict.fromkeys(advice for _, advice in found)
        raise ValueError(
            f"{'; '.join(problem for problem, _ in found)}: a hook, which computes it before the "
            "layer's forward, from parameters that wait on the host; expected such hooks inside of "
            "layers alone; have nn.Sequential(layer) in the layer's place, or "
            f"{', or '.join(instead)}"
        )


def _weights(layer: Module, waiting: Container[Parameter]) -> Iterator[tuple[str, str]]:
    """Kinds of hooks of the layer itself, and the names of what they compute."""
    computed = [
        name.removesuffix(suffix)
        for name, one in layer._parameters.items()
        for suffix in SUFFIXES
        if name.endswith(suffix) and one is not None and one in waiting
    ]
    for hook in layer._forward_pre_hooks.values():
        modules = [one.__module__ for one in type(hook).__mro__]
        kind = next((one for one in ADVICE if one in modules), None)
        if kind is not None:
            # A norm says which weight it computes; of pruning any has a name that tells.
            own = getattr(hook, "name", None)
            yield from ((kind, one) for one in dict.fromkeys(computed) if own in (None, one))
