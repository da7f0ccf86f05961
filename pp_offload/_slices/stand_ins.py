"""What stands where other things were while layers compute, and how these come back.

    stand_ins = StandIns()  # lives as long as the layers
    y = stand_ins.compute(call, [StandIn(module._parameters, "weight", tensor)], rnns, pack)

NOTE [ An interrupt at any line ]
    An interrupt may come between any two lines, also of what puts things back, and of PyTorch's
    files. So no context manager is used: it may be entered or left in part, and one that is a
    generator is resumed when it is collected, which may be inside of the next forward. What was
    there is known before anything is exchanged, putting it back twice does no harm, and it is done
    twice: one interrupt leaves one of them whole. Where more than one come, the next who uses the
    layers puts back what is left, by the record that outlived the call.
    Hooks for saved tensors are off at once: see :func:`pp_offload._hooks.hook_scopes.saving`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import RNNBase

from pp_offload._hooks.hook_scopes import saving
from pp_offload._slices.recurrent import lists_now
from pp_offload._slices.running import Running


class StandIn(NamedTuple):
    """Something that is to stand somewhere for a while."""

    values: MutableMapping[str, Any]
    """Parameters of a module, or attributes of an object."""

    name: str
    """In it."""

    new: Any
    """What is to stand there."""


class Exchange:
    """What one call has exchanged.

    Args:
        running: Says whether the call still runs.
    """

    __slots__ = ("_before", "running")

    def __init__(self, running: Running) -> None:
        self._before: list[StandIn] = []
        self.running = running

    def make(self, stand_ins: Iterable[StandIn]) -> None:
        """Exchange some more."""
        stand_ins = list(stand_ins)
        # All of them first: what stands there still is put back like the rest.
        self._before += [StandIn(one.values, one.name, one.values[one.name]) for one in stand_ins]
        for values, name, new in stand_ins:
            values[name] = new

    def undo(self) -> None:
        """Put all back. A second time changes nothing."""
        for values, name, before in reversed(self._before):
            values[name] = before


class StandIns:
    """What stands in places of some layers. See NOTE [ An interrupt at any line ]."""

    def __init__(self) -> None:
        self._exchanges: list[Exchange] = []

    def __deepcopy__(self, memo: object) -> StandIns:
        """In a copy of the layers nothing is under way."""
        return StandIns()

    def compute(
        self,
        call: Callable[[], Any],
        stand_ins: Iterable[StandIn],
        rnns: Sequence[RNNBase] = (),
        pack: Callable[[Tensor], Any] | None = None,
    ) -> Any:
        """What ``call`` returns while other things stand there.

        Args:
            call: Computes.
            stand_ins: Of parameters first.
            rnns: Those among the layers. They get lists of what stands there.
            pack: The hook that saves tensors meanwhile; nothing is changed about that when None.
        """
        self.settle()
        running = Running()
        exchange = Exchange(running)
        try:
            try:
                self._exchanges.append(exchange)
                exchange.make(stand_ins)
                exchange.make(StandIn(vars(rnn), *one) for rnn in rnns for one in lists_now(rnn))
                return saving(pack, call)
            finally:
                self._undo(exchange)
        finally:
            self._undo(exchange)  # an interrupt may have cut the first one off

    def settle(self) -> None:
        """Put back what interrupts have left, if they have."""
        while self._exchanges and not self._exchanges[-1].running.is_running:
            self._undo(self._exchanges[-1])

    def _undo(self, exchange: Exchange) -> None:
        """Put back what a call has exchanged, after what calls inside of it have left."""
        while exchange in self._exchanges:
            self._exchanges[-1].undo()
            self._exchanges.pop()
