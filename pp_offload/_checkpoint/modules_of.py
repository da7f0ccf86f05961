"""Modules that a function computes with, as far as one can see before it runs.

    modules_of(partial(layer.forward, mask=mask))   # [layer]
    modules_of(lambda x: layer(x), *args)           # and modules among its arguments

A function that gets a module from elsewhere, such as an attribute of some object in its closure, is
not seen through.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType

from torch.nn import Module

MOST_ENTRIES = 1000
"""A longer list holds data, not layers."""


def modules_of(*values: object) -> list[Module]:
    """Modules that these are, hold, are bound to, or have been given; none is part of another.

    Args:
        values: Functions and their arguments.
    """
    found: dict[int, Module] = {}
    seen: set[int] = set()
    left = list(values)
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Module):
            found[id(value)] = value
        else:
            left += _parts(value)
    if len(found) > 1:
        for outer in list(found.values()):
            for inner in outer.modules():
                if inner is not outer:
                    found.pop(id(inner), None)
    return list(found.values())


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, MethodType):
        return value.__self__, value.__func__
    if isinstance(value, FunctionType):
        return _known_to(value)
    if isinstance(value, partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, dict | list | tuple):
        entries = value.values() if isinstance(value, dict) else value
        return entries if len(entries) <= MOST_ENTRIES else ()
    if callable(value) and not isinstance(value, type):
        attributes = getattr(value, "__dict__", {})
        return [one for one in attributes.values() if isinstance(one, Module)]
    return ()


def _known_to(function: FunctionType) -> Iterator[object]:
    """What its closure, its defaults and, if they are modules, its globals hold."""
    yield from map(_content, function.__closure__ or ())
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, Module):
            yield value


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
