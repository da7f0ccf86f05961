"""Plain attributes of a module that say what is in its buffers, such as the length of a table.

A module makes a longer table where it needs one, and notes the length. A second run that has the
table of before and the length of now would read what is not there.

    attributes = PlainAttributes(module)      # ahead of the first run
    then, now = attributes.then_and_now()     # ahead of a later one
    put(module, then)
    put(module, now)                          # and behind it

NOTE [ Built by its first run ]
    A module may make its own parameters or parts in its first forward, and note that in a flag. A
    second run must not make them again, for nobody would train those. So a module that has more of
    them than before keeps its attributes, and buffers that came with them.
"""

from __future__ import annotations

import torch
from torch.nn import Module

PLAIN = {bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size}
"""Of these kinds; a tensor would be held until backward."""

_OTHER = object()
"""In the place of a value of another kind."""

_MISSING = object()
"""In the place of a value that was not there."""

_OWN = frozenset(vars(Module()))
"""What every module has for PyTorch, and its mode."""


class PlainAttributes:
    """Those of one module, as they are when this is made.

    Args:
        module: Without its parts.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        tables = vars(module), module._parameters, module._modules
        self._values = {
            name: value if type(value) in PLAIN else _OTHER
            for table in tables
            for name, value in table.items()
            if name not in _OWN
        }

    @property
    def is_built(self) -> bool:
        """Whether it has more parameters or parts now. See NOTE [ Built by its first run ]."""
        tables = self._module._parameters, self._module._modules
        return any(
            value is not None and self._values.get(name) is None
            for table in tables
            for name, value in table.items()
        )

    def then_and_now(self) -> tuple[Values, Values]:
        """What is to be :func:`put` ahead of a second run, and behind it."""
        there = vars(self._module)
        elsewhere = {*self._module._parameters.keys(), *self._module._modules.keys()}
        then = {
            name: value
            for name, value in self._values.items()
            if value is not _OTHER and name not in elsewhere
        }
        for name, value in there.items():
            if name not in self._values and name not in _OWN and type(value) in PLAIN:
                then[name] = _MISSING
        return then, {name: there.get(name, _MISSING) for name in then}


Values = dict[str, object]
"""Of attributes, by name."""


def put(module: Module, values: Values) -> None:
    """Give a module attributes, or take them away, as :class:`PlainAttributes` says."""
    there = vars(module)
    for name, value in values.items():
        if value is _MISSING:
            there.pop(name, None)
        else:
            there[name] = value
