"""The step, as its chunks and the window see it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pp_offload._core.group import Group
from pp_offload._core.window import Visit
from pp_offload._groups.split_backward import SplitBackward
from pp_offload._policy.plan import ChunkKey


class Step:
    """This one has a single chunk, and knows nothing of its backward."""

    def add(self, chunk: Any, split: SplitBackward | None) -> ChunkKey | None:
        """A chunk's first group starts; ``split`` says whether its backward comes in two parts.

        Returns:
            Its key, in a step that may have others.
        """
        return None

    def is_next(self, chunk: Any) -> bool:
        """Whether backward certainly runs ``chunk`` next."""
        return False

    def after(self, group: Group) -> Iterator[Visit]:
        """What backward visits behind ``group``, next one first."""
        return iter(())

    def begin(self, group: Group) -> None:
        """Backward has reached ``group``."""
