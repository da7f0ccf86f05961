"""Predicts the next layers from the order in which layers ran in the last forward.

A model may skip layers, call one twice, or have several stacks. A wrong guess costs an unused
copy.

    order.begin()
    following = order.arrive(layer, 2)   # in a forward: the next two layers
    order.end()
    before = order.return_to(layer, 2)   # when a backward recomputes a layer
"""

from __future__ import annotations

from collections.abc import Sequence


class LayerOrder:
    """Layers by number; layers not in the last forward come in the ``usual`` order."""

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
            self._last = self._seen  # except a forward that ended early
        self._seen = []

    def arrive(self, layer: int, num: int) -> list[int]:
        """Note that the forward reached a layer; return the ``num`` layers expected next."""
        self._seen.append(layer)
        if layer in self._last[self._place :]:
            self._place = place = self._last.index(layer, self._place) + 1
            return self._last[place : place + num]
        place = self.usual.index(layer) + 1 if layer in self.usual else len(self.usual)
        return self.usual[place : place + num]

    def return_to(self, layer: int, num: int) -> list[int]:
        """Note that a backward reached a layer; return the ``num`` layers expected next."""
        places = [place for place, number in enumerate(self._last) if number == layer]
        if not places:
            return []
        # A place above that of the layer before means another backward.
        self._place_back = max((p for p in places if p < self._place_back), default=places[-1])
        return self._last[max(0, self._place_back - num) : self._place_back][::-1]
