"""Reloads that are not used up, in numbers; see :mod:`pp_offload._transfer.pending_reloads`.

reloads = PendingReloads(device)
reloads.begin([one], arrival)    # it comes
reloads.give_up(one)             # nobody wants it
reloads.poll()                   # payloads that are gone, copies that are over
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pp_offload._transfer.pending_reloads import MAX_ABANDONED
from pp_offload.plan.chunks import Arrival, Reload, Saved
from pp_offload.plan.device import NumberDevice
from pp_offload.simulate.clocks import VirtualEvent


class Abandoned(NamedTuple):
    """Memory that a copy still fills, though nobody wants it."""

    memory: Reload
    reloaded: VirtualEvent


class PendingReloads:
    """Payloads on the device, or on their way there, that backward has not asked for.

    Args:
        device: Where they come.

    Attributes:
        nbytes: Their bytes.
        gone: Payloads whose reload nobody will ask for.
        abandoned: Memory of such ones, as long as copies fill it.
    """

    def __init__(self, device: NumberDevice) -> None:
        self.nbytes = 0
        self._device = device
        self.gone: deque[Saved] = deque()
        self.abandoned: deque[Abandoned] = deque()

    def expect(self, saved: Sequence[Saved]) -> None:
        """They will come; :meth:`begin` says later where."""
        for one in saved:
            if one.arrival is None:
                one.arrival = Arrival()
                self.nbytes += one.nbytes

    def begin(self, saved: Sequence[Saved], arrival: Arrival) -> None:
        """They have memory from now on."""
        memory = self._device.memory
        for one in saved:
            if one.arrival is None:
                self.nbytes += one.nbytes
            one.arrival, one.memory = arrival, Reload(one.spec.reload_bytes)
            memory.add(one.spec.reload_bytes)

    # Several payloads of the same bytes

    def share(self, one: Saved) -> bool:
        """Give it the memory of another with the same bytes."""
        for other in one.others():
            if other.arrival is not None and other.memory is not None:
                if other.arrival.reloaded is not None:
                    if one.arrival is not None:  # expected, which its memory is from now on
                        self.nbytes -= one.nbytes
                    one.arrival, one.memory = other.arrival, other.memory
                    other.memory.num_users += 1
                    other.memory.num_holders += 1
                    return True
        return False

    def pass_on(self, one: Saved, comes_soon: Callable[[Saved], bool]) -> None:
        """As ``_pass_on``: to one of the same bytes that backward will ask for soon."""
        for other in one.others():
            if other.num_waiting > 0 and other.arrival is None and comes_soon(other):
                self.share(other)
                return

    # Used, or not wanted

    def give_up(self, one: Saved) -> None:
        """Its memory stays until the copy into it has run."""
        memory, arrival, one.memory, one.arrival = one.memory, one.arrival, None, None
        if memory is None:
            self.nbytes -= one.nbytes * (arrival is not None)
            return
        memory.num_users -= 1
        if not memory.num_users:
            self.nbytes -= one.nbytes
            if arrival is not None and arrival.reloaded is not None and not arrival.is_there:
                self.abandoned.append(Abandoned(memory, arrival.reloaded))
                return
        memory.let_go(self._device.memory)

    def forget(self, one: Saved) -> None:
        """Autograd holds it no more: :meth:`poll` gives it up."""
        self.gone.append(one)

    def poll(self) -> None:
        """Give up what was meant for payloads that are gone; forget copies that are over."""
        gone, abandoned = self.gone, self.abandoned
        while gone:
            self.give_up(gone.popleft())
        while abandoned and abandoned[0].reloaded.time_s <= self._device.host.now_s:
            abandoned.popleft().memory.let_go(self._device.memory)

    def keep_few_abandoned(self) -> None:
        """Let more than a few go: compute waits for the copies into them."""
        while len(self.abandoned) > MAX_ABANDONED:
            memory, reloaded = self.abandoned.popleft()
            self._device.compute.wait_event(reloaded)
            memory.let_go(self._device.memory)
