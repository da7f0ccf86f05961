"""Finds the modules that a function computes with, as far as visible before it runs.

modules_of(partial(layer.forward, mask=mask))   # [layer]
modules_of(lambda x: layer(x), *args)           # [layer], and modules among its arguments
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from types import CellType, FunctionType, MethodType

from torch.nn import Module


def modules_of(*values: object) -> list[Module]:
    """Return modules that these functions and arguments are or hold."""
    modules: list[Module] = []
    visited: dict[int, object] = {}
    to_visit = list(values)
    while to_visit:
        value = to_visit.pop()
        if id(value) in visited:
            continue
        visited[id(value)] = value
        if isinstance(value, Module):
            modules.append(value)
        else:
            to_visit += _parts(value)
    return modules


def _parts(value: object) -> Iterable[object]:
    match value:
        case MethodType():
            return value.__self__, value.__func__
        case partial():
            return value.func, *value.args, *value.keywords.values()
        case FunctionType():
            names = map(value.__globals__.get, value.__code__.co_names)
            modules = [named for named in names if isinstance(named, Module)]
            return *(value.__closure__ or ()), *(value.__defaults__ or ()), *modules
        case CellType():
            return [value.cell_contents] if value != CellType() else ()  # else not assigned yet
        case dict():
            return list(value.values())
        case list() | tuple() if len(value) <= 1000:  # a longer one holds data
            return value
    return ()
