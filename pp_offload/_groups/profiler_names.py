"""Names of groups and copies in ``torch.profiler``, while it runs.

``mlp (forward)``, ``mlp (offload)`` and ``mlp (reload)`` are around the host's work; ``mlp
(backward)`` is the point where backward reaches the group. Without a profiler nothing is observed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from pp_offload._common.torch_private import is_profiling
from pp_offload._core.group import Group
from pp_offload._core.observers import Observer, Observers, named
from pp_offload._core.payloads import Payloads


class ProfilerNames(Observer):
    """Observes an engine while a profiler runs."""

    def __init__(self) -> None:
        self._observers: Observers | None = None
        self._open: dict[int, tuple[Group, AbstractContextManager[object]]] = {}

    def begin(self, observers: Observers) -> None:
        """Begin a step: observe the engine if a profiler runs, else stop observing."""
        if self._observers is not None:
            self._observers.remove(self)
        while self._open:  # groups that were never committed
            self._open.popitem()[1][1].__exit__(None, None, None)
        self._observers = observers if is_profiling() else None
        if self._observers is not None:
            self._observers.add(self)

    def opened(self, group: Group) -> None:
        shown = named(group.name, "forward")
        shown.__enter__()
        self._open[id(group)] = group, shown  # keeps the group alive, so that its id stays unique

    def closed(self, group: Group, payloads: Payloads | None) -> None:
        if id(group) in self._open:
            self._open.pop(id(group))[1].__exit__(None, None, None)

    def reached(self, group: Group) -> None:
        with named(group.name, "backward"):  # a point, because it cannot end in another node
            pass

    def copied(self, lap: object, moved: object, event: object, *, to_host: bool) -> None:
        """Do nothing: the mover names copies only if an observer has this method."""
