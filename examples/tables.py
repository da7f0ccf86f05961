"""Rows of text as a table.

print(format_table([("way", "step ms"), ("none", "104"), ("full", "129")]))
"""

from __future__ import annotations

from collections.abc import Sequence


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """The first row is the head, the first column is flush left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for first, *others in rows:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join((first.ljust(widths[0]), *cells)))
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)
