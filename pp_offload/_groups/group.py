"""A named set of saved tensors that leave and come back together.

A group is open from its start to its commit; what autograd saves meanwhile joins it. The commit
either offloads it or keeps it. The tensors' lives belong to autograd: an open group knows them
weakly, and a closed one the tickets it may prefetch.

       OPEN --commit--> OFFLOADED   copies queued
         +------commit--> KEPT      stays on the device: policy, or no room on the host
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterator

from torch import Tensor

from pp_offload._groups.plan import GroupKey
from pp_offload._transfer.engine import record, wait
from pp_offload._transfer.saved_tensor import SavedActivation
from pp_offload._transfer.ticket import Ticket
from pp_offload.backends import Event, Stream
from pp_offload.errors import GroupStateError


class GroupState(enum.Enum):
    """Where a group is in its life."""

    OPEN = "open"
    OFFLOADED = "offloaded"
    KEPT = "kept on the device"


class OffloadTensorGroup:
    """Tensors saved between a start and its commit.

    Args:
        name: The user's name for it, such as ``mlp_norm``.
        key: Its place in the step, if it has one.
        on_use: Called with the group whenever backward is about to use one of its tensors.

    Source: Megatron-LM ``OffloadTensorGroup``.
    """

    def __init__(
        self,
        name: str,
        *,
        key: GroupKey | None = None,
        on_use: Callable[[OffloadTensorGroup], None] | None = None,
    ) -> None:
        self.name = name
        self.key = key
        self.state = GroupState.OPEN
        self.is_used = False
        self.is_brought = False
        self.has_failed = False
        self.total_tensor_count = 0
        self.total_offload_bytes = 0
        self.copied_bytes = 0
        self._on_use = on_use
        self._saved: list[weakref.ref[SavedActivation]] = []
        self._tensors: dict[object, Tensor] = {}
        self._tickets: list[weakref.ref[Ticket]] = []
        self._events: dict[str, Event] = {}

    def push_tensor(self, tag: object, tensor: Tensor) -> None:
        """Hold ``tensor`` under ``tag`` until it is popped or the group is committed."""
        self._tensors[tag] = tensor

    def pop_tensor(self, tag: object) -> Tensor:
        """Take the tensor under ``tag`` out of the group.

        Raises:
            GroupStateError: Nothing is held under ``tag``.
        """
        if tag not in self._tensors:
            raise GroupStateError(
                f"group '{self.name}' ({self.state.value}) holds no tensor under {tag!r}; "
                f"it holds {len(self._tensors)}; pop a tag that push_tensor was given, once"
            )
        return self._tensors.pop(tag)

    def add(self, saved: SavedActivation) -> None:
        """Autograd saved one more tensor. It may drop it before the group is committed."""
        self._saved.append(weakref.ref(saved))

    @property
    def num_saved(self) -> int:
        """How many tensors autograd saved in it, as long as it is open."""
        return len(self._saved)

    def saved(self) -> list[SavedActivation]:
        """What autograd saved and still holds, in order, as long as the group is open."""
        return [saved for ref in self._saved if (saved := ref()) is not None]

    @property
    def is_alive(self) -> bool:
        """Whether autograd holds a tensor that it saved here and that left or may leave."""
        return bool(self.saved()) or next(self.tickets_last_first(), None) is not None

    def move_to(self, state: GroupState) -> None:
        """Close the group: it is offloaded, or kept.

        Raises:
            GroupStateError: It was closed before.
        """
        if self.state is not GroupState.OPEN or state is GroupState.OPEN:
            raise GroupStateError(
                f"group '{self.name}' is {self.state.value} and cannot become {state.value}; only "
                "an open group changes, once: commit it once"
            )
        self.state = state
        self._saved = []
        self._tensors.clear()

    @property
    def is_forgotten(self) -> bool:
        """Whether its forward ended well, backward used it, and nobody has committed it."""
        return self.state is GroupState.OPEN and self.is_used and not self.has_failed

    def follow(self, tickets: list[Ticket]) -> None:
        """Know these tickets, for prefetch, as long as they live."""
        self._tickets = [weakref.ref(ticket) for ticket in tickets]

    def tickets_last_first(self) -> Iterator[Ticket]:
        """The living tickets, those saved last, which backward uses first, first."""
        for ref in reversed(self._tickets):
            ticket = ref()
            if ticket is not None:
                yield ticket

    def ticket(self, index: int) -> Ticket | None:
        """One of those it follows, if it lives."""
        return self._tickets[index]() if index < len(self._tickets) else None

    def waiting(self) -> Iterator[Ticket]:
        """What backward has still to ask for, in the order of use."""
        return (ticket for ticket in self.tickets_last_first() if ticket.num_waiting > 0)

    def wanted(self) -> Iterator[Ticket]:
        """What must be brought before backward reaches it, in the order of use."""
        for ref in reversed(self._tickets):
            ticket = ref()
            if ticket is not None and ticket.num_waiting > 0 and not ticket.is_coming:
                yield ticket

    def on_use(self) -> None:
        """Backward is about to use one of the tensors."""
        if self._on_use is not None:
            self._on_use(self)

    def drop(self) -> None:
        """Forget every tensor of an open group, as when the step was aborted."""
        self._saved.clear()
        self._tensors.clear()

    def record_offload_event(self, stream: Stream) -> None:
        """Note the point of ``stream`` behind which the copies to the host are done."""
        self._events["offload"] = record(stream)

    def wait_offload_event(self, stream: Stream) -> None:
        """Make ``stream`` wait for the copies to the host. Without an event there is no wait."""
        wait(stream, self._events.get("offload"))

    def record_reload_event(self, stream: Stream) -> None:
        """Note the point of ``stream`` behind which the tensors are back."""
        self._events["reload"] = record(stream)

    def wait_reload_event(self, stream: Stream) -> None:
        """Make ``stream`` wait for the tensors to be back. Without an event there is no wait."""
        wait(stream, self._events.get("reload"))

    def update_offload_info(self, tensor: Tensor) -> None:
        """Count ``tensor`` among what offloading this group moves."""
        self.total_tensor_count += 1
        self.total_offload_bytes += tensor.nbytes
