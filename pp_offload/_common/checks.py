"""What an argument must be, said the same way wherever a user gives one.

Each check says what was found, what was expected and, where it is not plain, what to do. Numbers
and flags that cannot be right are a ``ValueError``, objects of another kind a ``TypeError``. Checks
come before anything is changed.

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

MAX_SAID = 100
"""Characters of a value in a message; a longer one is cut."""

FORMER = {
    "device_budget_bytes": "which is gone: give max_in_flight_bytes and prefetch_bytes, or "
    "device_limit_bytes for all that is on the device"
}
"""Options there were, and what to do."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))

_Cls = TypeVar("_Cls", bound=type)


def said(value: object) -> str:
    """``value`` in a message: itself if it is plain and short, else what kind of thing it is.

    A tensor would be copied from its device to be printed, and a model fills the screen.
    """
    if not isinstance(value, (*_PLAIN, list, tuple, set, dict)):
        return str(value) if isinstance(value, enum.Enum) else _kind_of(value)
    try:
        text = repr(value)
    except Exception:  # from something inside
        return _kind_of(value)
    is_plain = isinstance(value, _PLAIN)
    if len(text) <= MAX_SAID and "\n" not in text:
        return text if is_plain else f"the {type(value).__qualname__} {text}"
    return f"{text[:MAX_SAID]}..." if is_plain else _kind_of(value)


def _kind_of(value: object) -> str:
    name = type(value).__qualname__
    return f"an {name}" if name[0] in "AEIOUaeiou" else f"a {name}"


def described(tensor: Tensor) -> str:
    """A tensor in a message, whatever its kind: nested and some wrapped ones refuse questions.

    For what is said while something else goes wrong, so it never raises.
    """
    parts = [f"shape {_asked(tensor, 'shape')}", f"dtype {_asked(tensor, 'dtype')}"]
    layout = _asked(tensor, "layout")
    if layout != "torch.strided":
        parts.append(f"layout {layout}")
    kind = "nested tensor" if _asked(tensor, "is_nested") == "True" else "tensor"
    return f"a {kind} of {', '.join(parts)}"


def version_of(tensor: Tensor) -> str:
    """A tensor's version in a message, whatever its kind. Never raises."""
    return _asked(tensor, "_version")


def _asked(tensor: Tensor, name: str) -> str:
    try:
        value = getattr(tensor, name)
        return str(tuple(value) if name == "shape" else value)
    except Exception:  # RuntimeError, NotImplementedError, or what a subclass raises
        return "unknown"


def count_problem(name: str, value: object, least: int = 0, unit: str = "") -> str | None:
    """What is wrong with a count; None if nothing. ``True`` is no count, and neither is 2.0."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return None
    of = f" ({unit})" if unit else ""
    return f"{name} is {said(value)}, expected an integer of at least {least}{of}"


def flag_problem(name: str, value: object) -> str | None:
    """What is wrong with a flag; None if nothing. ``"no"`` and 0 are none."""
    return None if isinstance(value, bool) else f"{name} is {said(value)}, expected True or False"


def check_all(*problems: str | None) -> None:
    """Raise one error for all problems, if there are any.

    Raises:
        ValueError: One error that lists every problem.
    """
    found = [problem for problem in problems if problem]
    if found:
        raise ValueError("; ".join(found))


def check_count(name: str, value: object, *, least: int = 0, unit: str = "") -> None:
    """Check a count of things, elements or bytes.

    Raises:
        ValueError: It is no integer, or below ``least``.
    """
    if type(value) is int and value >= least:  # every microbatch asks
        return
    check_all(count_problem(name, value, least, unit))


def check_flag(name: str, value: object) -> None:
    """Check a flag.

    Raises:
        ValueError: It is neither True nor False.
    """
    check_all(flag_problem(name, value))


def check_switch(name: str, value: object) -> None:
    """Check what is on or off: True, False, or what stands for one of them.

    A config may have None, 0 or 1 there, or a bool of NumPy's. Called for every group that runs.

    Raises:
        ValueError: It is something else, such as ``"no"``, which would be taken for on.
    """
    if value is True or value is False or value is None:
        return
    is_number = isinstance(value, int) or type(value).__name__ == "bool"  # that of NumPy
    if not is_number or value not in (0, 1):
        check_all(flag_problem(name, value))


def check_kind(
    name: str, value: object, kind: type | tuple[type, ...], expected: str, advice: str = ""
) -> None:
    """Check that an object is of a certain class.

    Args:
        name: Of the argument.
        value: What was given.
        kind: What it must be an instance of.
        expected: That in words, such as ``an nn.Module``.
        advice: What to do instead.

    Raises:
        TypeError: It is of another.
    """
    if not isinstance(value, kind):
        raise TypeError(
            f"{name} is {said(value)}, expected {expected}" + (f"; {advice}" if advice else "")
        )


def check_group_name(action: str, name: object) -> None:
    """Check a group's name. Called for every group that runs, so a good name takes one test.

    Raises:
        TypeError: ``name`` is no ``str``.
        ValueError: It is empty.
    """
    if isinstance(name, str) and name:
        return
    kind = ValueError if name == "" else TypeError
    raise kind(
        f"{action} of a group whose name is {said(name)}, expected a str, such as 'mlp'; give the "
        "start and the commit of a group the same name"
    )


def checked_tensors(name: str, given: object) -> Sequence[Tensor] | None:
    """Check tensors in a list, tuple or other collection, which may be left out.

    Raises:
        TypeError: It is a single tensor, no collection, or holds something else.
    """
    if given is None:
        return None
    if isinstance(given, Tensor):
        raise TypeError(f"{name} is a single tensor, expected a list of them; write [tensor]")
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"{name} is {said(given)}, expected a list of tensors, or None")
    tensors = given if isinstance(given, list | tuple) else list(given)
    for index, one in enumerate(tensors):
        if not isinstance(one, Tensor):
            raise TypeError(
                f"{name}[{index}] is {said(one)}, expected a tensor; leave out what is none"
            )
    return tensors


def near(name: object, known: Sequence[str]) -> str:
    """Which of ``known`` may have been meant, for the end of a message; empty if none is near."""
    text = name if isinstance(name, str) else ""
    found = [one for one in known if text and one.lower() == text.lower()]
    found = found or difflib.get_close_matches(text, known, n=1, cutoff=0.5)
    found = found or [one for one in known if text and one.startswith(text)][:1]
    return f" (did you mean {found[0]}?)" if found else ""


def check_known(options: Iterable[object], known: Sequence[str], of: str = "") -> None:
    """Check names of options.

    Args:
        options: Their names.
        known: All that there are.
        of: What has the options, for the message.

    Raises:
        ValueError: There is no such option; the message names near ones.
    """
    if unknown := [f"{one!r}{near(one, known)}" for one in options if one not in known]:
        whose = f"{of} has " if of else ""
        raise ValueError(
            f"{whose}unknown options {', '.join(unknown)}; expected some of {', '.join(known)}"
        )


def takes_options_by_name(cls: _Cls) -> _Cls:
    """Has a dataclass report an option that does not exist together with other violations.

    The constructor that ``dataclass`` writes would raise a bare ``TypeError``, before the other
    options are checked.

    Raises:
        OptionError: From the constructor. It is a ``ConfigError`` and a ``TypeError``, and says
            what else is wrong.
    """
    init = cls.__init__  # type: ignore[misc]
    known = [one.name for one in fields(cls)]

    def unknown(name: str) -> str:
        return f"{name}, {FORMER[name]}" if name in FORMER else f"{name}{near(name, known)}"

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        kind = type(self).__name__
        problems = [unknown(name) for name in options if name not in known]
        if problems:
            problems = [
                f"{kind} has no option {', '.join(problems)}; expected some of {', '.join(known)}"
            ]
        if args:
            problems.append(
                f"{kind} was given {said(args[0])} without a name, expected options by name; write "
                f"{kind}(name=value), or {kind}(**options) for a dict"
            )
        if not problems:
            init(self, **options)
            return
        try:
            init(self, **{name: options[name] for name in options if name in known})
        except (ValueError, TypeError) as others:
            problems.append(str(others))
        raise OptionError("; ".join(problems))

    cls.__init__ = checked  # type: ignore[misc]
    return cls
