"""A named part of a forward, whose saved tensors leave together and come back together.

       OPEN --commit--> OFFLOADED   its batch left
         +------commit--> KEPT      stays on the device: policy, or no room on the host

Autograd owns the saved tensors, and they their batch. The group refers to both weakly. Chunks and
groups have keys that are the same in every step, as long as steps are alike.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from pp_offload._common.torch_private import never_compiled
from pp_offload._core.batch import Batch, Wanted
from pp_offload._core.cheap_operators import maker_of
from pp_offload._core.saved import Packed, Resident, Saved, Wrapped, is_wrapper
from pp_offload.backends import Stream
from pp_offload.errors import GroupStateError

_target = methodcaller("__call__")  # of a weak reference; in C, and no further than a living one


class GroupState(enum.Enum):
    """State of a group."""

    OPEN = "open"
    OFFLOADED = "offloaded"
    KEPT = "kept on the device"


class Counts:
    """Numbers of payloads and bytes that a group may send, and that it sent."""

    num_tensors = 0  # recipes, and payloads that may leave, whatever the plan
    nbytes = 0  # of the payloads that may leave
    copied_bytes = 0  # that the group copied itself, without those another group had copied
    # Within ``nbytes``, of sources that are copied in place of tensors made of them without a loss:
    # by a cast, or by repetition.
    narrowed_bytes = 0
    recipe_bytes = 0  # of the storages that recipes compute
    again_bytes = 0  # the same if backward computes them again


class Group:
    """Tensors saved between a start and its commit.

    Args:
        name: The user's name for the group, such as ``mlp_norm``.
        engine: The Engine that offloads the group, even if the next step has another engine.
        min_numel: Elements; smaller tensors stay on the device.
    """

    # Defaults of the class: most groups keep them, and groups are made during a forward.
    borrowed: Sequence[tuple[weakref.ref[Batch], int]] = ()  # payloads of other groups' batches
    key: GroupKey | None = None  # place of the group in the step, if it has one
    has_failed = False  # whether an exception came out of its forward, as its context saw

    # Megatron's users give a name alone.
    def __init__(self, name: str, *, engine: Any = None, min_numel: int = 0) -> None:
        self.name = name
        self.state = GroupState.OPEN
        self.is_used = False  # whether backward has asked for one of its tensors
        self.saved_refs: list[weakref.ref[Saved]] = []  # what autograd saved, in order
        self.streams: list[Stream] = []  # on which tensors were saved
        self.counts = Counts()  # set by the commit
        self.engine = engine
        self._min_numel = min_numel
        # A weak reference to its own batch, once that has left. Until then, gives None as well.
        self.batch: Callable[[], Batch | None] = type(None)

    @never_compiled
    def pack(self, tensor: Tensor) -> Packed:
        """Save ``tensor`` in this group, as a pack hook; of a wrapper, save its inner tensors."""
        engine = self.engine
        if self.state is not GroupState.OPEN or not engine.is_enabled:
            return Resident(tensor)
        kind = type(tensor)
        if kind is Tensor and tensor.numel() < self._min_numel:  # usual, so without a call
            if engine.eligibility.largest_small is not None:
                engine.eligibility.note_small(self.name, tensor)
            return Resident(tensor)
        if engine.eligibility.admits(tensor, self._min_numel):
            stream = engine.current_stream()
            if stream not in self.streams:
                self.streams.append(stream)
            saved = Saved(tensor, self)
            if engine.recipes is not None:
                saved.maker = maker_of(tensor)
            self.saved_refs.append(weakref.ref(saved))
            return saved
        if kind is not Tensor and kind is not Parameter and is_wrapper(tensor):
            wrapped = Wrapped(tensor, self.name, self.pack)
            if not all(isinstance(part, Resident) for part in wrapped.inner.values()):
                return wrapped
        return Resident(tensor)

    @property
    def is_alive(self) -> bool:
        """Whether autograd holds a saved tensor of this group that left or might have left."""
        return any(map(_target, self.saved_refs))

    def move_to(self, state: GroupState) -> None:
        """Close the group. Raises a GroupStateError if it was closed before."""
        if self.state is not GroupState.OPEN:
            raise GroupStateError(
                f"group '{self.name}' is {self.state.value} and cannot become {state.value}; only "
                "an open group changes, once: commit it once"
            )
        self.state = state
        self.drop()

    def drop(self) -> None:
        """Forget what made its tensors, which only an open group needs: it keeps a graph alive."""
        for ref in self.saved_refs:
            if (saved := ref()) is not None:
                saved.maker = None

    @property
    def is_forgotten(self) -> bool:
        """Whether its forward ended well, backward used it, and it was never committed."""
        return self.state is GroupState.OPEN and self.is_used and not self.has_failed

    @property
    def is_left_behind(self) -> bool:
        """Whether the group saved tensors, was never committed, and backward has not used it."""
        return self.state is GroupState.OPEN and not self.is_used and bool(self.saved_refs)

    def on_use(self) -> None:
        """Tell the engine that backward is about to use the group for the first time."""
        self.engine.guarded(self.engine.reach, self)

    def note_use(self) -> None:
        """Mark the group as reached by backward: its uses count no longer as later ones."""
        self.is_used, batch = True, self.batch()
        if batch is not None:
            for uses in batch.later.values():
                uses.pop(None, None)
        for ref, index in self.borrowed:
            if (lender := ref()) is not None:
                lender.later[index].pop(id(self), None)

    # Reloads

    def wanted(self) -> list[Wanted]:
        """Return payloads, by batch, that its backward will use and that are not on the device."""
        wanted, batch = [], self.batch()
        if batch is not None and batch.back.num_away and (indices := batch.back.away()):
            wanted.append((batch, indices))
        for ref, index in () if self.is_used else self.borrowed:
            lender = ref()
            if lender is not None and index in lender.back.away():
                wanted.append((lender, [index]))
        return wanted

    def uses(self) -> list[Wanted]:
        """Return payloads, by batch, that its backward has still to use."""
        uses, batch = [], self.batch()
        if batch is not None:
            part, uses_left = batch.back.part, batch.back.uses_left
            indices = range(len(uses_left)) if part is None else part
            uses.append((batch, [index for index in indices if uses_left[index] > 0]))
        if not self.is_used:
            uses += [(batch, [i]) for ref, i in self.borrowed if (batch := ref()) is not None]
        return uses


class ChunkKey(NamedTuple):
    """A chunk of a step, named alike in every step."""

    vp_stage: int  # virtual pipeline stage
    microbatch: int  # number in the step, from 0


class WeightPassKey(NamedTuple):
    """The second part of a chunk's split backward."""

    chunk: ChunkKey


class Place(NamedTuple):
    """Position of a group in the forward of a stage, the same for all microbatches."""

    vp_stage: int
    position: int


class GroupKey(NamedTuple):
    """A group of a step, named alike in every step."""

    chunk: ChunkKey
    position: int  # in the chunk's forward, from 0

    @property
    def place(self) -> Place:
        """This key without the microbatch."""
        return Place(self.chunk.vp_stage, self.position)
