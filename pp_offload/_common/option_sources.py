"""Sizes in bytes, as a user reads and types them, and options as the environment has them.

parse_size("2GiB")                    # 2147483648
size_said(2**31)                      # "2.00 GiB"
read_env("PP_OFFLOAD_", os.environ)   # {"prefetch_bytes": "2GiB", ...}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from math import ceil

UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", 1)},
    "KB": 1000,
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}
"""Bytes of each unit."""

_LETTERS = {prefix: 1024**power for power, prefix in enumerate("KMGT", 1)}
_TYPED = {
    typed: nbytes
    for unit, nbytes in (UNITS | _LETTERS).items()
    for typed in (unit, unit.lower(), unit.upper())
}
"""Units as users type them. ``G`` is GiB, as in schedulers and containers; ``Gb`` would be bits."""

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int | None:
    """Bytes of a number with or without a unit; None if ``text`` is no whole number of bytes."""
    nbytes = _exact_bytes(text)
    return int(nbytes) if nbytes is not None and nbytes.denominator == 1 else None


def parse_limit(text: str) -> int | None:
    """Bytes of a number with or without a unit, rounded down, as of 0.95GiB; None if it is none."""
    nbytes = _exact_bytes(text)
    return None if nbytes is None else int(nbytes)


def _exact_bytes(text: str) -> Fraction | None:
    match = _SIZE.fullmatch(text)
    unit = None if match is None else _TYPED.get(match[2] or "B")
    return None if match is None or unit is None else Fraction(match[1]) * unit


def size_said(nbytes: int, *, is_least: bool = False) -> str:
    """Bytes in GiB or, where that would read 0.00, in a smaller unit: ``"1.50 MiB"``.

    Args:
        nbytes: Number of bytes.
        is_least: Round up, so that a user who types the text has enough.
    """
    for unit in ("GiB", "MiB", "KiB"):
        if nbytes >= UNITS[unit] / 10:
            hundredths = Fraction(100 * nbytes, UNITS[unit])
            return f"{(ceil(hundredths) if is_least else round(hundredths)) / 100:.2f} {unit}"
    return f"{nbytes} B"


def bytes_said(nbytes: int, *, is_least: bool = False) -> str:
    """Bytes as a number, and in the words of :func:`size_said`: ``"1572864 (1.50 MiB)"``."""
    text = size_said(nbytes, is_least=is_least)
    return str(nbytes) if text.endswith(" B") else f"{nbytes} ({text})"


def read_env(prefix: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables with this prefix, by the rest of their names in small letters."""
    return {
        name.removeprefix(prefix).lower(): text
        for name, text in environ.items()
        if name.startswith(prefix)
    }
