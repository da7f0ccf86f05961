"""Modules that a function computes with, as far as one can see before it runs.

modules_of(partial(layer.forward, mask=mask))   # [layer]
modules_of(lambda x: layer(x), *args)           # and modules among its arguments
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from types import FunctionType, MethodType

from torch.nn import Module

MOST_ENTRIES = 1000
"""A longer list holds data, not layers."""


def modules_of(*values: object) -> list[Module]:
    """Modules that these functions and arguments are or hold; none is part of another."""
    modules: dict[int, Module] = {}
    seen: set[int] = set()
    to_visit = list(values)
    while to_visit:
        value = to_visit.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Module):
            modules[id(value)] = value
        else:
            to_visit += _parts(value)
    if len(modules) > 1:
        for outer in list(modules.values()):
            for inner in outer.modules():
                if inner is not outer:
                    modules.pop(id(inner), None)
    return list(modules.values())


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, MethodType):
        return value.__self__, value.__func__
    if isinstance(value, FunctionType):
        return _used_by(value)
    if isinstance(value, partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, dict):
        return _parts(list(value.values()))
    if isinstance(value, list | tuple):
        return value if len(value) <= MOST_ENTRIES else ()
    if callable(value) and not isinstance(value, type):
        return _modules_among(getattr(value, "__dict__", {}).values())
    return ()


def _used_by(function: FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            pass
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from _modules_among(map(function.__globals__.get, function.__code__.co_names))


def _modules_among(values: Iterable[object]) -> list[object]:
    return [value for value in values if isinstance(value, Module)]
