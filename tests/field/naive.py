"""An offload engine as one writes it first, to show that the field tests can fail.

It is right for plain training: each microbatch goes forward once and backward once, in the same
order, as many in every step, on one stream, and every saved tensor is used once. In all else it
has, on purpose, the faults of engines in the field:

- A saved tensor is popped when it is first used; a second use is a ``KeyError``.
- A tag is a group and a number. It is looked up in the chunk at the head of a queue, and that
  chunk is taken for one with tensors without a look.
- Only what was reloaded ahead is waited for. A reload on demand waits for nothing.
- A host buffer is free for the next as soon as the copy out of it is queued. The contiguous copy
  of a view is made when its order to the transfer is settled already, and dropped at once.
- Waits go to the compute stream that was current when the manager was made.
- Within a group a storage is known by address and dtype, also when it is gone; a view at the same
  address gets the bytes of the first. Over groups the same tensor is copied again.
- Views come back without their gaps and broadcasts, and all tensors on the manager's device.
- Parameters stay, but their views, buffers and whatever else has enough elements leave.
- No version is compared.
- The memory of tensors that came back is reused when backward reaches another group; what groups
  behind that one still hold is dropped.
- Tensors that are to be released are emptied at once, whoever else looks at their storage.
- The first step, even one without grad, decides how many microbatches are offloaded.
- Groups are committed last in, first out.
- Bytes belong to the chunk and not to the graph; nothing is cleaned up after an exception.
- Markers are identity functions in the graph. The backward of a group's start has the next group
  reloaded, however large it is; where the input needs no grad there is no such backward.
- Leaving a group while offload is disabled leaves its hooks installed.
- Streams are taken as they are, also while a graph is captured.
- What was asked for and does nothing is never said.
- Budgets and other options are not looked at. Host memory is kept by exact shape, but for views.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from naive_transfer import NaiveTransfer, Stored
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from pp_offload import FineGrainedActivationOffloadingInterface as Interface
from pp_offload import OffloadConfig, PipelineOffloadManager
from pp_offload._groups.chunk_queue import ChunkQueue
from pp_offload._groups.idle_groups import IdleGroups
from pp_offload._groups.plan import ChunkKey, GroupKey, Plan
from pp_offload._transfer.tensors import StorageSet
from pp_offload.backends import Backend, GraphSafeBackend, default_backend


class Eligibility:
    """Which saved tensors leave. What it is told to keep is forgotten."""

    def __init__(self) -> None:
        self.kept = StorageSet()

    def admits(self, tensor: Tensor, min_numel: int) -> bool:
        """Whether the tensor is no Parameter, has enough elements, and bears no mark."""
        is_marked = getattr(tensor, "is_not_offloadable", False)
        return not (isinstance(tensor, Parameter) or is_marked) and tensor.numel() >= min_numel


class Kept(NamedTuple):
    """What autograd holds of a tensor that stays."""

    tensor: Tensor

    def unpack(self) -> Tensor:
        return self.tensor


class Tag(NamedTuple):
    """What autograd holds of one that left: where to look in the chunk that is current then."""

    manager: NaiveManager
    group: int
    number: int
    shape: torch.Size

    def unpack(self) -> Tensor:
        return self.manager.on_get_saved_tensor(self)


class Group:
    """A name, and the storages it saw."""

    def __init__(self, name: str, index: int) -> None:
        self.name, self.index = name, index
        self.seen: dict[tuple[int, torch.dtype], Stored] = {}


class NaiveChunk:
    """The groups of one microbatch."""

    def __init__(self, manager: NaiveManager, number: int, min_numel: int) -> None:
        self.wiring = manager.wiring
        self.manager, self.key, self.min_numel = manager, ChunkKey(0, number), min_numel
        self.groups: list[Group] = []
        self.open: list[Group] = []
        self.tensors: dict[tuple[int, int], Stored] = {}
        self.nbytes: Counter[str] = Counter()
        self._num_saved = 0
        self._in_use: list[Tensor] = []
        self._last: int | None = None

    def start(self, name: str) -> Group:
        """Open a group."""
        self.open.append(Group(name, len(self.groups)))
        self.groups.append(self.open[-1])
        return self.open[-1]

    def commit(
        self, name: str, released: Sequence[Tensor] | None = None, *, delay: bool = False
    ) -> Group:
        """Close the group started last, and empty what is to be released."""
        group = self.open.pop()
        if group.name != name:
            raise RuntimeError(f"commit of group '{name}', but the last one is '{group.name}'")
        for tensor in released or ():
            release(tensor)
        return group

    def pack(self, _group: Group, tensor: Tensor) -> Tag | Kept:
        """Copy a tensor of the group started last to the host, unless its address is known."""
        wiring, group = self.wiring, (self.open or self.groups)[-1]
        is_resident = GroupKey(self.key, group.index) in wiring.plan.kept
        may_leave = wiring.eligibility.admits(tensor, self.min_numel)
        if is_resident or not may_leave or not wiring.is_enabled:
            return Kept(tensor.detach())
        key = tensor.data_ptr(), tensor.dtype
        if key not in group.seen:
            group.seen[key] = stored = Stored(group.name, tensor.detach())
            wiring.transfer.offload([stored])
            self.nbytes[group.name] += stored.nbytes
        self._num_saved += 1
        self.tensors[group.index, self._num_saved] = group.seen[key]
        return Tag(self.manager, group.index, self._num_saved, tensor.shape)

    def tensor_pop(self, tag: Tag) -> Tensor:
        """The tensor under a tag, for the first and last time."""
        if tag.group != self._last:
            self._reach(tag.group)
        tensor = self.wiring.transfer.use(self.tensors.pop((tag.group, tag.number)))
        self._in_use.append(tensor)
        return tensor if tensor.shape == tag.shape else tensor.reshape(tag.shape)

    def _reach(self, index: int) -> None:
        """Backward comes to another group: drop what is behind."""
        transfer, self._last = self.wiring.transfer, index
        for key in [key for key in self.tensors if key[0] > index]:
            transfer.drop(self.tensors.pop(key))
        while self._in_use:
            release(self._in_use.pop())

    def on_group_start_backward(self, index: int) -> None:
        """Backward leaves a group: reload the one before it, or the last one of the next chunk."""
        if index > 0:
            self.reload_ahead(index - 1)
        elif following := self.manager.front_backward_chunk():
            following.reload_ahead(len(following.groups) - 1)

    def reload_ahead(self, index: int) -> None:
        """Queue the reloads of a group, and give its host buffers to the next who offloads."""
        for one in dict.fromkeys(one for key, one in self.tensors.items() if key[0] == index):
            if one.landed is None:
                self.wiring.transfer.reload(one, is_ahead=True)


def release(tensor: Tensor) -> None:
    """Take a tensor's memory away. What is there then is somebody else's: garbage, no crash."""
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    storage.resize_(0)
    storage.resize_(nbytes)
    torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(255)


class NaiveManager:
    """In place of :class:`PipelineOffloadManager`."""

    def __init__(
        self, *, config: OffloadConfig | None = None, backend: Backend | None = None
    ) -> None:
        self.config = config or OffloadConfig()
        backend = backend or default_backend()
        self.backend: Backend = backend.inner if isinstance(backend, GraphSafeBackend) else backend
        self.d2h_stream, self.h2d_stream = self.backend.d2h, self.backend.h2d
        self.num_attached = 0
        self.idle_groups = IdleGroups()
        self.step = SimpleNamespace(is_warmup=True, pipeline_rank=0, queue=ChunkQueue())
        self.wiring = SimpleNamespace(
            transfer=NaiveTransfer(self.backend),
            eligibility=Eligibility(),
            plan=Plan(),
            is_enabled=True,
            offloader=SimpleNamespace(split=None),
        )
        self.statistics = self.wiring.transfer.statistics
        self.offload_summary_bytes: dict[str, int] = {}
        self._chunks: list[NaiveChunk] = []
        self._num_begun = 0
        self._current: NaiveChunk | None = None
        self._in_backward: NaiveChunk | None = None
        self._queue: deque[NaiveChunk] = deque()
        self._delayed: list[tuple[Any, Any]] = []
        self._scopes: list[saved_tensors_hooks] = []

    def init_model_chunk_offload_handler(
        self,
        vp_size: int | None,
        vp_stage: int | None,
        min_offloaded_tensor_size: int = 1024 * 1024,
        *,
        microbatch: int | None = None,
    ) -> None:
        """Begin a microbatch; after the first step, only if that had as many."""
        self._current = None
        if self.step.is_warmup or self._num_begun < len(self._chunks):
            self._current = NaiveChunk(self, self._num_begun, min_offloaded_tensor_size)
            self._queue.append(self._current)
            if self.step.is_warmup:
                self._chunks.append(self._current)
        self._num_begun += 1

    begin_chunk = init_model_chunk_offload_handler

    def end_chunk(self) -> None:
        """The forward of a microbatch is over."""
        self._current = None

    def begin_backward(self, key: ChunkKey) -> None:
        """Nobody listens."""

    def cur_forward_chunk(self) -> NaiveChunk | None:
        return self._current

    def front_backward_chunk(self) -> NaiveChunk | None:
        return self._queue[0] if self._queue else None

    def open_chunk(self, action: str, name: str) -> NaiveChunk | None:
        """The chunk for a marker, whatever is going on."""
        return self._current

    def reset(self) -> None:
        """Begin a step. The first one that had chunks decides about all to come.

        From then on the last group of each name in its first chunk stays on the device.
        """
        self.flush_delayed_groups()
        if self.step.is_warmup and self._chunks:
            self.step.is_warmup = False
            first = self._chunks[0]
            last = {group.name: GroupKey(first.key, group.index) for group in first.groups}
            self.wiring.plan = Plan(kept=frozenset(last.values()))
            self.offload_summary_bytes = dict(sum((c.nbytes for c in self._chunks), Counter()))
        self._num_begun = 0
        self._current = None

    def abort(self) -> None:
        """What is left is left."""

    retire = release_idle_memory = abort

    def verify(self) -> list[str]:
        """It has no idea."""
        return []

    def disable_offload(self) -> None:
        self.wiring.is_enabled = False

    def enable_offload(self) -> None:
        self.wiring.is_enabled = True

    def mark_not_offloadable(self, tensor: Tensor) -> None:
        """The mark is on this object; a view of it has none."""
        tensor.is_not_offloadable = True  # type: ignore[attr-defined]

    def push_offload_groups(self, group_hook: Any, forced_released_tensors: Any) -> None:
        self._delayed.append((group_hook, forced_released_tensors))

    def flush_delayed_groups(self) -> None:
        while self._delayed:
            group_hook, tensors = self._delayed.pop(0)
            group_hook(tensors)

    def __enter__(self) -> NaiveManager:
        scope = saved_tensors_hooks(self.on_save_for_backward, self.on_get_saved_tensor)
        scope.__enter__()
        self._scopes.append(scope)
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self._scopes.pop().__exit__()

    def on_save_for_backward(self, tensor: Tensor) -> Tag | Kept:
        chunk = self._current
        if chunk is None or not chunk.open:
            return Kept(tensor)
        return chunk.pack(chunk.open[-1], tensor)

    def on_get_saved_tensor(self, saved: Tag | Kept) -> Tensor:
        """Look the tag up in the chunk that is current, or in the next when that is finished."""
        if isinstance(saved, Kept):
            return saved.tensor
        if self._in_backward is None or not self._in_backward.tensors:
            if not self._queue:
                raise KeyError(f"no chunk is left for group {saved.group}, tensor {saved.number}")
            self._in_backward = self._queue.popleft()
        return self._in_backward.tensor_pop(saved)


class Start(torch.autograd.Function):
    """Identity whose backward, if it has one, tells that backward leaves a group."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, chunk: NaiveChunk) -> Tensor:
        ctx.chunk, ctx.index = chunk, len(chunk.groups) - 1
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.chunk.on_group_start_backward(ctx.index)
        return gradient, None


class Commit(torch.autograd.Function):
    """Identity."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class NaiveScope:
    """Methods in place of those of :class:`FineGrainedActivationOffloadingInterface`."""

    enter, leave = Interface.__enter__, Interface.__exit__
    commit = staticmethod(Interface.group_commit)

    def __enter__(self: Any) -> Tensor:
        tensor = NaiveScope.enter(self)
        chunk = PipelineOffloadManager.get_instance().cur_forward_chunk()
        return Start.apply(tensor, chunk) if self.is_open else tensor

    def __exit__(self: Any, *error: object) -> None:
        if PipelineOffloadManager.get_instance().wiring.is_enabled:
            NaiveScope.leave(self, *error)

    @staticmethod
    def group_commit(tensor: Any, *args: Any, **options: Any) -> Any:
        tensor = NaiveScope.commit(tensor, *args, **options)
        return Commit.apply(tensor) if isinstance(tensor, Tensor) else tensor


def _become_naive(manager: Any, **options: Any) -> None:
    manager.__class__ = NaiveManager
    manager.__init__(**options)


@contextmanager
def installed(*, waits_on_demand: bool = False) -> Iterator[None]:
    """Every manager made inside is a naive one, and markers are in the graph."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PipelineOffloadManager, "__init__", _become_naive)
        patch.setattr(NaiveTransfer, "waits_on_demand", waits_on_demand)
        for name in ("__enter__", "__exit__", "group_commit"):
            patch.setattr(Interface, name, NaiveScope.__dict__[name])
        try:
            yield
        finally:
            while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
                torch._C._autograd._pop_saved_tensors_default_hooks()
