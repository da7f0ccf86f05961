"""Checks of arguments, with the same words for every public function.

Each message says what was found, what was expected and, unless it is plain, what to do. A wrong
number or flag is a ``ValueError``, an object of another class a ``TypeError``. Check before
changing anything.

    check_count("num_slices", num_slices, least=1)
    check_kind("model", model, Module, "an nn.Module")
"""

from __future__ import annotations

import difflib
import enum
import functools
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from torch import Tensor

from pp_offload.errors import OptionError

MAX_BRIEF = 100  # most characters of a value in a message
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_Cls = TypeVar("_Cls", bound=type)


def brief(value: object) -> str:
    """Format a value for a message: its text if it is plain and short, else its class. The text of
    a tensor would take a copy from its device, and that of a model fills the screen.
    """
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    if not isinstance(value, (*_PLAIN, list, tuple, set, dict)):
        return str(value) if isinstance(value, enum.Enum) else _class_of(value)
    text = repr(value)
    is_plain = isinstance(value, _PLAIN)
    if len(text) <= MAX_BRIEF and "\n" not in text:
        return text if is_plain else f"the {type(value).__qualname__} {text}"
    return f"{text[:MAX_BRIEF]}..." if is_plain else _class_of(value)


def _class_of(value: object) -> str:
    name = type(value).__qualname__
    return f"an {name}" if name[0] in "AEIOUaeiou" else f"a {name}"


def described(tensor: Tensor) -> str:
    """Format a tensor for a message about another error. Never raises."""
    try:
        return f"a tensor of shape {tuple(tensor.shape)}, dtype {tensor.dtype}"
    except Exception:  # nested tensors have no shape, and a subclass may refuse every question
        return _class_of(tensor)


def count_problem(name: str, value: object, least: int = 0, unit: str = "") -> str | None:
    """Return the problem of a count, or None. ``True`` and 2.0 are no counts."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return None
    of = f" ({unit})" if unit else ""
    return f"{name} is {brief(value)}, expected an integer of at least {least}{of}"


def flag_problem(name: str, value: object) -> str | None:
    """Return the problem of a flag, or None. ``"no"`` and 0 are no flags."""
    return None if isinstance(value, bool) else f"{name} is {brief(value)}, expected True or False"


def check_all(*problems: str | None) -> None:
    """Raise one ValueError that lists all problems, unless all are None."""
    if any(problems):
        raise ValueError("; ".join([problem for problem in problems if problem]))


def check_count(name: str, value: object, *, least: int = 0, unit: str = "") -> None:
    """Raise a ValueError unless ``value`` is an integer of at least ``least``."""
    check_all(count_problem(name, value, least, unit))


def check_flag(name: str, value: object) -> None:
    """Raise a ValueError unless ``value`` is True or False."""
    check_all(flag_problem(name, value))


def check_kind(
    name: str, value: object, kind: type | tuple[type, ...], expected: str, advice: str = ""
) -> None:
    """Raise a TypeError unless ``value`` is an instance of ``kind``, in words: ``expected``."""
    if not isinstance(value, kind):
        more = f"; {advice}" if advice else ""
        raise TypeError(f"{name} is {brief(value)}, expected {expected}{more}")


def check_group_name(action: str, name: object) -> None:
    """Raise a TypeError or ValueError unless ``name`` is a ``str`` that is not empty."""
    if isinstance(name, str) and name:
        return
    kind = ValueError if name == "" else TypeError
    raise kind(
        f"{action} of a group whose name is {brief(name)}, expected a str, such as 'mlp'; give the "
        "start and the commit of a group the same name"
    )


def checked_tensors(name: str, given: Any) -> Sequence[Tensor] | None:
    """Return a list of tensors, or None; raise a TypeError for a single tensor, and for others."""
    check_kind(name, given, (list, tuple, type(None)), "a list of tensors, or None")
    for index, item in enumerate(given or ()):
        check_kind(f"{name}[{index}]", item, Tensor, "a tensor")
    return given  # type: ignore[no-any-return]


def near(name: object, names: Sequence[str]) -> str:
    """Propose the nearest of ``names``, for the end of a message; empty if none is near."""
    text, by_lower = str(name).lower(), {each.lower(): each for each in names}
    close = difflib.get_close_matches(text, by_lower, n=1, cutoff=0.5)
    return f" (did you mean {by_lower[close[0]]}?)" if close else ""


def check_names(options: Iterable[object], names: Sequence[str], of: str) -> None:
    """Raise a ValueError that proposes near names, if options of the owner ``of`` do not exist."""
    if unknown := [f"{name!r}{near(name, names)}" for name in options if name not in names]:
        raise ValueError(
            f"{of} has unknown options {', '.join(unknown)}; expected some of {', '.join(names)}"
        )


def takes_options_by_name(cls: _Cls) -> _Cls:
    """Decorate a dataclass to raise an OptionError, with near names, for unknown options first."""
    init = cls.__init__  # type: ignore[misc]
    names = [each.name for each in fields(cls)]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        kind = type(self).__name__
        if args:
            raise OptionError(
                f"{kind} was given {brief(args[0])} without a name, expected options by name; "
                f"write {kind}(name=value), or {kind}(**options) for a dict"
            )
        if unknown := [f"{name}{near(name, names)}" for name in options if name not in names]:
            expected = f"expected some of {', '.join(names)}"
            raise OptionError(f"{kind} has no option {', '.join(unknown)}; {expected}")
        init(self, **options)

    cls.__init__ = checked  # type: ignore[misc]
    return cls
