"""Writes docs/compatibility.md from the list in docs/peers.toml.

    python docs/compatibility.py

Nothing is imported but Python, neither this package nor another library. A test holds the page to
what is written here, and the list to what can be imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tomllib

HERE = Path(__file__).parent
SOURCE = HERE / "peers.toml"
TARGET = HERE / "compatibility.md"

HEAD = """\
<!-- Written by docs/compatibility.py from docs/peers.toml. Change it there. -->

# If you come from another library

What other libraries export for offload and checkpoints, what is here for it, and what differs.
Names of ours are below `pp_offload`; those without a dot can be imported from there. Losses,
gradients and parameters are those without offload, bit for bit; only
[`OffloadModel`](offload-model.md) and `offload_layers` may sum in another order, where a
parameter is used more than once.
"""


@dataclass(frozen=True)
class Name:
    """One name of another library."""

    theirs: str
    """Dotted, or a word of a configuration."""

    differs: str
    """What does, in a sentence."""

    ours: str = ""
    """Dotted, below ``pp_offload``; empty where there is nothing."""

    takes: tuple[str, ...] = ()
    """Parameters that both have, with equal defaults."""


@dataclass(frozen=True)
class Peer:
    """One library."""

    title: str
    version: str
    """That was looked at."""

    modules: tuple[str, ...]
    """Each public name of these is in the list."""

    names: tuple[Name, ...]


def peers(source: str) -> Iterator[Peer]:
    """The libraries, in order."""
    for title, found in tomllib.loads(source).items():
        names = tuple(
            Name(**{**one, "takes": tuple(one.get("takes", ()))}) for one in found["names"]
        )
        yield Peer(title, found["version"], tuple(found["modules"]), names)


def row(name: Name) -> str:
    """Of the table."""
    ours = f"`{name.ours}`" if name.ours else "-"
    return f"| `{name.theirs}` | {ours} | {name.differs} |"


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for peer in peers(SOURCE.read_text()):
        rows = "\n".join(map(row, peer.names))
        parts.append(
            f"## {peer.title}\n\nAs of {peer.version}.\n\n"
            f"| there | here | what differs |\n|---|---|---|\n{rows}\n"
        )
    return "\n".join(parts)


if __name__ == "__main__":
    TARGET.write_text(page())
    print(f"wrote {TARGET}", file=sys.stderr)
