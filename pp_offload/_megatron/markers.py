"""The reference's markers of a group: identity functions with signals in backward.

NOTE [ Markers ]
    The ``fine_grained_offloading_*`` functions of :mod:`pp_offload._megatron.interface` leave the
    graph as it is and do not use these classes. An identity function changes numbers: where a
    tensor is used several times, it changes the order in which gradients are summed, and so their
    last bits. It also either refuses in-place operations on its output, or cuts the output's
    history from that of its input. Nor is a signal needed: backward has reached a group when it
    asks for the first of its tensors, and prefetch brings the next ones before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pp_offload._hooks.regions import is_recomputing
from pp_offload._megatron.chunk import ChunkOffloadHandler


class FineGrainedOffloadingGroupStartFunction(torch.autograd.Function):
    """Identity that opens a group. Its output must not be changed in place: see NOTE [ Markers ].

    Source: Megatron-LM ``FineGrainedOffloadingGroupStartFunction``.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, cpu_offload_handler: ChunkOffloadHandler, name: str
    ) -> Tensor:
        """Open group ``name`` of the chunk; does nothing inside a checkpoint, or while offload is
        disabled.
        """
        ctx.chunk = None
        if not is_recomputing() and not cpu_offload_handler.leaves_out(name):
            ctx.chunk = cpu_offload_handler
            cpu_offload_handler.on_group_start_forward(name)
        return tensor

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        """Backward leaves the group."""
        if ctx.chunk is not None:
            ctx.chunk.on_group_start_backward()
        return grad_output, None, None


class FineGrainedOffloadingGroupCommitFunction(torch.autograd.Function):
    """Identity that commits a group. Its output must not be changed in place.

    Source: Megatron-LM ``FineGrainedOffloadingGroupCommitFunction``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        cur_forward_chunk: ChunkOffloadHandler,
        name: str,
        forced_released_tensors: Sequence[Tensor] | None,
        delay_offload: bool,
    ) -> Tensor:
        """Commit group ``name`` of the chunk; with ``delay_offload``, only note that.

        Does nothing in a recomputation, or if the group was started inside a checkpoint.
        """
        ctx.group = None
        if not is_recomputing() and not cur_forward_chunk.was_left_out(name):
            ctx.group = cur_forward_chunk.commit(name, forced_released_tensors, delay=delay_offload)
        return tensor

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Backward reaches the group."""
        if ctx.group is not None:
            ctx.group.on_use()
        return grad_output[0], None, None, None, None
