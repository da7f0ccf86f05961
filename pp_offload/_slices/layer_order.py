"""The order in which layers ran, to tell which come next: that of the last forward.

A model may skip layers, call one twice, or have several stacks; nobody says so before. So the order
is looked at, and the next forward is expected to be like the last. A backward is expected to be the
last forward in reverse. A wrong guess costs a copy that nobody uses, and never a number.

    order.begin()
    following = order.arrive(layer, 2)   # in a forward: the two that come after
    order.end()
    before = order.return_to(layer, 2)   # where a backward computes a layer again
"""

from __future__ import annotations

from collections.abc import Sequence


class LayerOrder:
    """Layers by number.

    Args:
        usual: The order that is expected of a layer that was not in the last forward.

    Attributes:
        usual: The same.
    """

    def __init__(self, usual: Sequence[int]) -> None:
        self.usual = list(usual)
        self._last = self.usual
        self._seen: list[int] = []
        self._place = 0
        self._place_back = 0

    def begin(self) -> None:
        """A forward begins."""
        self._seen = []
        self._place = 0

    def end(self) -> None:
        """The forward has ended. One that ended early teaches nothing."""
        if self._seen and self._seen != self._last[: len(self._seen)]:
            self._last = self._seen
        self._seen = []

    def arrive(self, layer: int, num: int) -> list[int]:
        """The forward has come to a layer; the ``num`` that will come next, as far as known."""
        self._seen.append(layer)
        for place in range(self._place, len(self._last)):
            if self._last[place] == layer:
                self._place = place + 1
                return self._last[place + 1 : place + 1 + num]
        if layer not in self.usual:
            return []
        place = self.usual.index(layer)
        return self.usual[place + 1 : place + 1 + num]

    def return_to(self, layer: int, num: int) -> list[int]:
        """A backward has come to a layer; the ``num`` that will come next, as far as known."""
        places = [place for place, one in enumerate(self._last) if one == layer]
        if not places:
            return []
        # Above the place of the layer before, it is another backward.
        self._place_back = max((p for p in places if p < self._place_back), default=places[-1])
        return self._last[max(0, self._place_back - num) : self._place_back][::-1]
