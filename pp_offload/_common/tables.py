"""Rows of text as a table: ``format_table([("rank", "step ms"), ("0", "104")])``."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows; the first is the head. The first column is flush left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for first, *later in rows:
        cells = (cell.rjust(width) for cell, width in zip(later, widths[1:], strict=True))
        lines.append("  ".join((first.ljust(widths[0]), *cells)).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)
