"""Sizes in bytes, as a user reads and types them, and tables of text.

parse_size("2GiB")    # 2147483648
size_text(2**31)      # "2.00 GiB"
format_table([("rank", "step ms"), ("0", "104")])
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from math import ceil

MIB, GIB, GB = 2**20, 2**30, 10**9

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
"""Units as users type them. ``G`` is GiB, as in schedulers and containers; ``Gb`` means bits."""

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str, *, is_rounded: bool = False) -> int | None:
    """Return the bytes of a number with or without a unit; None if ``text`` is not a size, or, not
    ``is_rounded`` down, if it has a fraction of a byte, as 0.95GiB has.
    """
    match = _SIZE.fullmatch(text)
    unit = _TYPED.get(match[2] or "B") if match else None
    if match is None or unit is None:
        return None
    nbytes = Fraction(match[1]) * unit
    return int(nbytes) if is_rounded or nbytes.denominator == 1 else None


def size_text(nbytes: int, *, is_least: bool = False) -> str:
    """Format bytes in GiB or, below a tenth of that, in a smaller unit: ``"1.50 MiB"``. With
    ``is_least``, rounded up, so that the text as a limit is not below ``nbytes``.
    """
    for unit, least in (("GiB", UNITS["GiB"] / 10), ("MiB", UNITS["MiB"]), ("KiB", 100)):
        if nbytes >= least:
            return f"{_rounded(nbytes, unit, 2, is_least=is_least)} {unit}"
    return f"{nbytes} B"


def size_cell(nbytes: int, unit: str = "GiB", digits: int = 2, *, is_least: bool = False) -> str:
    """Format bytes in the unit of a table's column; if that would read 0, with another unit."""
    if 0 < nbytes < UNITS[unit] / 10**digits:
        return size_text(nbytes, is_least=is_least).replace(" ", "")
    return _rounded(nbytes, unit, digits, is_least=is_least)


def _rounded(nbytes: int, unit: str, digits: int, *, is_least: bool) -> str:
    parts = Fraction(10**digits * nbytes, UNITS[unit])
    return f"{(ceil(parts) if is_least else round(parts)) / 10**digits:.{digits}f}"


def bytes_text(nbytes: int, *, is_least: bool = False) -> str:
    """Format bytes as a number, and in the words of :func:`size_text`: ``"1572864 (1.50 MiB)"``."""
    text = size_text(nbytes, is_least=is_least)
    return str(nbytes) if text.endswith(" B") else f"{nbytes} ({text})"


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows; the first is the head. The first column is flush left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for first, *later in rows:
        cells = (cell.rjust(width) for cell, width in zip(later, widths[1:], strict=True))
        lines.append("  ".join((first.ljust(widths[0]), *cells)).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)
