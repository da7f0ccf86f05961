"""Options as files and the environment have them.

read_table("train.toml", "offload")   # {"prefetch_bytes": "2GiB", ...}
read_env("PP_OFFLOAD_", os.environ)   # {"prefetch_bytes": "2GiB", ...}
parse_size("2GiB")
"""

from __future__ import annotations

import importlib
import os
import platform
import re
from collections.abc import Mapping
from fractions import Fraction
from math import ceil
from typing import Any

from pp_offload._common.checks import near, said
from pp_offload.errors import ConfigError

UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", 1)},
    "KB": 1000,
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}
"""Bytes of each unit. Not ``G``, which some take for 1000 cubed, nor ``Gb``, which is bits."""

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int | None:
    """Bytes of a number with a unit or without; None if ``text`` is no whole number of bytes."""
    nbytes = _parts_of_bytes(text)
    return int(nbytes) if nbytes is not None and nbytes.denominator == 1 else None


def parse_limit(text: str) -> int | None:
    """As :func:`parse_size`, but a part of a byte is left out: 0.95GiB is a number to read."""
    nbytes = _parts_of_bytes(text)
    return None if nbytes is None else int(nbytes)


def size_said(nbytes: int, *, is_least: bool = False) -> str:
    """Bytes to read, in GiB or, where that would be 0.00, in a smaller unit.

    Args:
        nbytes: Of what is said.
        is_least: Round up, so that whoever types what was read has enough.
    """
    for unit in ("GiB", "MiB", "KiB"):
        if nbytes >= UNITS[unit] / 10:
            hundredths = Fraction(100 * nbytes, UNITS[unit])
            return f"{(ceil(hundredths) if is_least else round(hundredths)) / 100:.2f} {unit}"
    return f"{nbytes} B"


def bytes_said(nbytes: int, *, is_least: bool = False) -> str:
    """Bytes as they are, and so that they can be read: ``"1572864 (1.50 MiB)"``.

    Args:
        nbytes, is_least: As for :func:`size_said`.
    """
    text = size_said(nbytes, is_least=is_least)
    return str(nbytes) if text.endswith(" B") else f"{nbytes} ({text})"


def _parts_of_bytes(text: str) -> Fraction | None:
    found = _SIZE.fullmatch(text)
    unit = None if found is None else UNITS.get(found[2] or "B")
    return None if found is None or unit is None else Fraction(found[1]) * unit


def _toml_reader(name_of_file: str) -> Any:
    """Python's own reader of TOML, or the package that it was made of.

    Raises:
        ConfigError: This Python has neither.
    """
    for name in ("tomllib", "tomli"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ConfigError(
        f"{name_of_file} cannot be read: Python {platform.python_version()} has no tomllib, which "
        "comes with Python 3.11; install tomli, which reads TOML before, or give the options as a "
        "mapping to from_dict"
    )


def read_table(path: str | os.PathLike[str], table: str) -> dict[str, Any]:
    """A table of a TOML file.

    Args:
        path: Of the file.
        table: As its header names it, with dots; empty for the whole file.

    Raises:
        ConfigError: There is no such table, the file is no TOML, or Python cannot read TOML.
        OSError: The file cannot be read.
    """

    name_of_file = os.fspath(path)
    toml = _toml_reader(name_of_file)
    with open(path, "rb") as file:
        try:
            found: Any = toml.load(file)
        except (toml.TOMLDecodeError, UnicodeDecodeError) as failure:
            raise ConfigError(f"{name_of_file} is no TOML file: {failure}") from failure
    for name in table.split(".") if table else ():
        if name not in found:
            there = ", ".join(found) or "nothing"
            raise ConfigError(
                f"{name_of_file} has no table [{table}]{near(name, list(found))}, expected the "
                f"table with the options; there is {there}"
            )
        found = found[name]
        if not isinstance(found, dict):
            raise ConfigError(f"{name} in {name_of_file} is {said(found)}, expected a table")
    return dict(found)


def read_env(prefix: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables with this prefix, by the rest of their names in small letters."""
    return {
        name.removeprefix(prefix).lower(): text
        for name, text in environ.items()
        if name.startswith(prefix)
    }
