"""The order in which layers ran in the last forward, to tell which come next.

A model may skip layers, call one twice, or have several stacks. A wrong guess costs a copy that
nobody uses.

    order.begin()
    following = order.arrive(layer, 2)   # in a forward: the two that come after
    order.end()
    before = order.return_to(layer, 2)   # where a backward computes a layer again
"""

from __future__ import annotations

from collections.abc import Sequence


class LayerOrder:
    """Layers by number; ``usual`` is the order of those that were not in the last forward."""

    def __init__(self, usual: Sequence[int]) -> None:
        self.usual = list(usual)
        self._last = self.usual
        self._seen: list[int] = []
        self._place = self._place_back = 0

    def begin(self) -> None:
        self._seen = []
        self._place = 0

    def end(self) -> None:
        if self._seen and self._seen != self._last[: len(self._seen)]:
            self._last = self._seen  # but for one that ended early
        self._seen = []

    def arrive(self, layer: int, num: int) -> list[int]:
        """The forward has come to a layer; the ``num`` that are expected next."""
        self._seen.append(layer)
        if layer in self._last[self._place :]:
            self._place = place = self._last.index(layer, self._place) + 1
            return self._last[place : place + num]
        place = self.usual.index(layer) + 1 if layer in self.usual else len(self.usual)
        return self.usual[place : place + num]

    def return_to(self, layer: int, num: int) -> list[int]:
        """A backward has come to a layer; the ``num`` that are expected next."""
        places = [place for place, number in enumerate(self._last) if number == layer]
        if not places:
            return []
        # Above the place of the layer before, it is another backward.
        self._place_back = max((p for p in places if p < self._place_back), default=places[-1])
        return self._last[max(0, self._place_back - num) : self._place_back][::-1]
