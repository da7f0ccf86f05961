"""What a layer's forward calls: the reference's interface and functions.

    off_interface.init_chunk_handler(vp_size, vp_stage, min_offloaded_tensor_size)

    with off_interface(offload, x, "mlp_norm") as x:   # group starts; tensors saved join it
        y = self.norm(x)
    y = off_interface.group_commit(y, name="mlp_norm")  # copies are queued

Everything is bound to the chunk and group that are current at the call, so backward needs no
singleton.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pp_offload._common.checks import check_switch
from pp_offload._groups.chunk import Chunk
from pp_offload._groups.group import Group
from pp_offload._hooks.hook_scopes import HookScope, exact_exit, saving
from pp_offload._hooks.regions import is_recomputing
from pp_offload._hooks.untraced import Untraced
from pp_offload._megatron.cuda_graph import fine_grained_offloading_forward_record
from pp_offload._megatron.manager import PipelineOffloadManager
from pp_offload.errors import GroupStateError


def fine_grained_offloading_disable_offload() -> None:
    """From now on nothing is offloaded. A group that starts meanwhile is left to autograd whole."""
    PipelineOffloadManager.get_instance().disable_offload()


def fine_grained_offloading_enable_offload() -> None:
    """Offload again."""
    PipelineOffloadManager.get_instance().enable_offload()


def fine_grained_offloading_group_start(tensor: Tensor, name: str | None = None) -> Tensor:
    """Open a group on the current chunk.

    Args:
        tensor: The group's input. It may or may not require grad.
        name: Of the group; ``group`` if not given.

    Returns:
        ``tensor`` itself.

    Raises:
        GroupStateError: There is no chunk, or it belongs to another thread.
    """
    name = "group" if name is None or name == "" else name
    chunk = PipelineOffloadManager.get_instance().open_chunk("start", name)
    if chunk is not None:
        _start(chunk, name)
    return tensor


def fine_grained_offloading_group_commit(
    tensor: Any,
    name: str,
    forced_released_tensors: Sequence[Tensor] | None = None,
    delay_offload: bool = False,
) -> Any:
    """Close a group and queue the copies of its tensors to the host.

    Args:
        tensor: The group's output, or a tuple, list or dict of outputs; its structure is kept.
        name: What the group was started with.
        forced_released_tensors: Tensors to empty after the copy although something still refers
            to them. Unlike the reference, one whose storage anybody else shares is left alone.
        delay_offload: Only queue the commit, until
            :func:`fine_grained_offloading_group_flush_delayed_groups`.

    Returns:
        ``tensor`` itself.

    Raises:
        GroupStateError: There is no chunk, or no open group of this name.
    """
    chunk = PipelineOffloadManager.get_instance().open_chunk("commit", name)
    if chunk is None:
        return tensor
    if not chunk.left_out or not chunk.was_left_out(name):
        chunk.commit(name, forced_released_tensors, delay=delay_offload)
    return tensor


def fine_grained_offloading_group_flush_delayed_groups() -> None:
    """Do the commits that were delayed, in forward order. Does nothing in a recomputation."""
    if not is_recomputing():
        PipelineOffloadManager.get_instance().flush_delayed_groups()


def run_in_group(name: str, call: Callable[[], Any], begun: Callable[[], object]) -> Any:
    """What ``call`` returns, as a group of this name, which is committed.

    Args:
        name: Of the group.
        call: Computes.
        begun: Called when the group is open; not where no group is opened.
    """
    chunk = PipelineOffloadManager.get_instance().open_chunk("start", name)
    group = None if chunk is None else _start(chunk, name)
    if chunk is None or group is None:
        return call()
    try:
        begun()
        output = saving(Untraced(chunk.pack, group), call)
    except BaseException as error:
        group.has_failed = True
        if isinstance(error, Exception):  # which somebody may handle, and go on
            fine_grained_offloading_group_commit(None, name)
        raise
    return fine_grained_offloading_group_commit(output, name)


class FineGrainedActivationOffloadingInterface:
    """A group as a context: opened on entering, its saved tensors collected until leaving.

    The group is committed by :meth:`group_commit`, after or inside the context.

    Args:
        offload: If False, nothing happens but that ``with`` gives back ``tensor``.
        tensor: The group's input.
        name: Of the group.

    Raises:
        ValueError: ``offload`` is neither on nor off.

    Source: Megatron-LM ``FineGrainedActivationOffloadingInterface``.
    """

    def __init__(self, offload: bool, tensor: Tensor, name: str) -> None:
        if offload is not True:
            check_switch("offload", offload)
        self.offload = offload
        self.tensor = tensor
        self.name = name
        self._hooks: HookScope | None = None  # a compiler looks into __exit__
        self._group: Group | None = None

    @property
    def is_open(self) -> bool:
        """Whether a group was opened and still collects."""
        return self._group is not None

    def __enter__(self) -> Tensor:
        """Open the group; gives back its input. Inside a checkpoint no group is opened."""
        if not self.offload or torch.compiler.is_compiling():
            return self.tensor
        if self.is_open:
            raise GroupStateError(
                f"group '{self.name}' is entered again before it was left; expected one object of "
                f"{type(self).__name__} for each with"
            )
        try:
            pack = self._pack()
            if pack is not None:
                self._hooks = HookScope()
                self._hooks.enter(pack, self)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self.tensor

    def _pack(self) -> Untraced | None:
        """Open the group; the hook to save through, or None where no group is opened."""
        chunk = PipelineOffloadManager.get_instance().open_chunk("start", self.name)
        if chunk is None:
            return None
        self._group = group = _start(chunk, self.name)
        return None if group is None else Untraced(chunk.pack, group)

    @exact_exit
    def __exit__(self, *args: Any) -> None:
        """Stop collecting; an exception passes on."""
        if self._hooks is not None:
            self._hooks.leave()
        group, self._group = self._group, None
        if group is not None:
            group.has_failed = bool(args) and args[0] is not None

    @staticmethod
    def init_chunk_handler(
        vp_size: int | None, vp_stage: int | None, min_offloaded_tensor_size: int
    ) -> None:
        """Begin the forward of one microbatch; see
        :meth:`PipelineOffloadManager.init_model_chunk_offload_handler`.
        """
        PipelineOffloadManager.get_instance().begin_chunk(
            vp_size, vp_stage, min_offloaded_tensor_size
        )

    @staticmethod
    def get_context(flag: bool) -> AbstractContextManager[object]:
        """The manager, as a context that saves tensors through it; or one that does nothing."""
        return PipelineOffloadManager.get_instance() if flag else nullcontext()

    group_commit = staticmethod(fine_grained_offloading_group_commit)

    @staticmethod
    def mark_not_offloadable(tensor: Tensor) -> None:
        """Keep ``tensor`` and its views on the device."""
        PipelineOffloadManager.get_instance().mark_not_offloadable(tensor)

    @staticmethod
    def forward_record(event: Any) -> None:
        """See :func:`pp_offload._megatron.cuda_graph.fine_grained_offloading_forward_record`."""
        fine_grained_offloading_forward_record(event)

    @staticmethod
    def reset() -> None:
        """Begin a step: close the last one. Takes part in no collective."""
        PipelineOffloadManager.get_instance().reset()

    @staticmethod
    def reset_instance() -> None:
        """Drop the manager; the next call makes a new one."""
        PipelineOffloadManager.reset_instance()


def _start(chunk: Chunk, name: str) -> Group | None:
    """Open a group; none while offload is disabled, or inside a checkpoint."""
    return None if chunk.leaves_out(name) else chunk.start(name)
