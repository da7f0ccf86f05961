"""A named part of a forward, whose saved tensors leave together and come back together.

       OPEN --commit--> OFFLOADED   its batch left
         +------commit--> KEPT      stays on the device: policy, or no room on the host

Autograd owns the saved tensors, and they their batch. The group refers to both weakly.
"""

from __future__ import annotations

import enum
import weakref
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import Parameter

from pp_offload._core.batch import Batch
from pp_offload._core.saved import Packed, Resident, Saved, Wrapped
from pp_offload._policy.plan import GroupKey
from pp_offload._transfer.subclasses import is_wrapper
from pp_offload.errors import GroupStateError

if TYPE_CHECKING:
    from pp_offload._core.engine import Engine
    from pp_offload.backends import Stream


class GroupState(enum.Enum):
    """Where a group is in its life."""

    OPEN = "open"
    OFFLOADED = "offloaded"
    KEPT = "kept on the device"


class Group:
    """Tensors saved between a start and its commit.

    Args:
        name: The user's name for it, such as ``mlp_norm``.
        engine: Offloads it.
        min_numel: Smaller tensors stay on the device. In elements.

    Attributes:
        key: Its place in the step, if it has one.
        is_reached: Whether backward has asked for one of its tensors.
        has_failed: Whether an exception came out of its forward, as far as a context around it saw.
        saved: What autograd saved, weakly, in order, while the group is open.
        streams: The compute streams that saved it.
        borrowed: Payloads of other groups' batches that hold tensors of this one, too.
        sizes: Bytes of what may leave, once it is committed, whether or not the plan lets it.
        copied_bytes: Bytes that it copied itself.
    """

    def __init__(self, name: str, engine: Engine, min_numel: int) -> None:
        self.name = name
        self.key: GroupKey | None = None
        self.state = GroupState.OPEN
        self.is_reached = False
        self.has_failed = False
        self.saved: list[weakref.ref[Saved]] = []
        self.streams: list[Stream] = []
        self.borrowed: list[tuple[weakref.ref[Batch], int]] = []
        self.sizes: list[int] = []
        self.copied_bytes = 0
        self._engine = engine
        self._min_numel = min_numel
        self._batch: weakref.ref[Batch] | None = None

    def pack(self, tensor: Tensor) -> Packed:
        """The pack hook: save ``tensor`` here; of a wrapper, the tensors inside it."""
        engine = self._engine
        if self.state is not GroupState.OPEN or not engine.is_enabled:
            return Resident(tensor)
        if engine.eligibility.admits(tensor, self._min_numel):
            stream = engine.current_stream()
            if stream not in self.streams:
                self.streams.append(stream)
            saved = Saved(tensor, self)
            self.saved.append(weakref.ref(saved))
            return saved
        kind = type(tensor)
        if kind is not Tensor and kind is not Parameter and is_wrapper(tensor):
            wrapped = Wrapped(tensor, self.name, self.pack)
            if not wrapped.is_resident:
                return wrapped
        return Resident(tensor)

    def living(self) -> list[Saved]:
        """What autograd saved and still holds, while the group is open."""
        return [saved for ref in self.saved if (saved := ref()) is not None]

    @property
    def is_alive(self) -> bool:
        """Whether autograd holds something that it saved here and that left or may leave."""
        refs = [self._batch, *[ref for ref, _ in self.borrowed]]
        return any(ref is not None and ref() is not None for ref in refs) or bool(self.living())

    def close(self, state: GroupState) -> None:
        """It is offloaded, or kept.

        Raises:
            GroupStateError: It was closed before.
        """
        if self.state is not GroupState.OPEN:
            raise GroupStateError(
                f"group '{self.name}' is {self.state.value} and cannot become {state.value}; only "
                "an open group changes, once: commit it once"
            )
        self.state = state
        self.saved = []

    def reach(self) -> None:
        """Backward is about to use one of its tensors for the first time."""
        self._engine.window.reach(self)

    # What is to come back

    def follow(self, batch: Batch) -> None:
        """Its bytes left with ``batch``."""
        self._batch = weakref.ref(batch)

    def own_batch(self) -> Batch | None:
        """Its batch, while autograd holds a tensor in it."""
        return None if self._batch is None else self._batch()

    def wanted(self) -> list[tuple[Batch, list[int]]]:
        """Payloads that its backward will ask for and that are not on the device, by batch."""
        wanted = []
        batch = None if self._batch is None else self._batch()
        if batch is not None:
            indices = batch.missing()
            if indices:
                wanted.append((batch, indices))
        if self.borrowed and not self.is_reached:
            wanted += self._borrowed_wanted()
        return wanted

    def _borrowed_wanted(self) -> list[tuple[Batch, list[int]]]:
        living = [(batch, index) for ref, index in self.borrowed if (batch := ref()) is not None]
        return [(b, [i]) for b, i in living if b.back.device[i] is None and b.back.left[i] > 0]

    def uses(self) -> list[tuple[Batch, list[int]]]:
        """Payloads that its backward has still to ask for, by batch."""
        batch = self.own_batch()
        uses = []
        if batch is not None:
            uses.append((batch, [i for i, left in enumerate(batch.back.left) if left > 0]))
        if not self.is_reached:
            uses += [(batch, [i]) for ref, i in self.borrowed if (batch := ref()) is not None]
        return uses
