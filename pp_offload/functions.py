"""The markers of a group: identities in forward, signals in backward.

NOTE [ Markers ]
    A marker is a view of the tensor, with a hook on the view's autograd node. An identity
    ``autograd.Function`` would either refuse in-place operations on its output, or cut the
    output's history from that of its input, and then ``h.add_(1)`` behind a marker gives wrong
    gradients to whoever still reads the input. A view has autograd's own rules for both.
    Backward reaches a group at its commit (the end) and leaves it at its start. If an in-place
    operation replaces the node, the signal is lost and the first unpack takes its place.

The ``...Function`` classes are the reference's; the ``fine_grained_offloading_*`` functions of
:mod:`pp_offload.interface` use the views.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pp_offload.chunk import ChunkOffloadHandler
from pp_offload.tensors import map_tensors


def mark_start(tensor: Tensor, on_backward: Callable[[], None]) -> Tensor:
    """``tensor``, and ``on_backward`` called when backward leaves it behind.

    Returns it as it is where there is no gradient to pass by.
    """
    if not _can_be_marked(tensor):
        return tensor
    marked = tensor.view_as(tensor)
    if marked.grad_fn is not None:
        marked.grad_fn.register_hook(lambda inputs, outputs: on_backward())
    return marked


def mark_commit(output: Any, on_backward: Callable[[], None]) -> Any:
    """``output``, with ``on_backward`` called when backward first reaches one of its tensors.

    Tuples, lists and dicts keep their structure.
    """

    def mark(tensor: Tensor) -> Tensor:
        if not _can_be_marked(tensor):
            return tensor
        marked = tensor.view_as(tensor)
        if marked.grad_fn is not None:
            marked.grad_fn.register_prehook(lambda grads: on_backward())
        return marked

    return map_tensors(output, mark)


def _can_be_marked(tensor: Tensor) -> bool:
    return tensor.requires_grad and tensor.layout is torch.strided and torch.is_grad_enabled()


class FineGrainedOffloadingGroupStartFunction(torch.autograd.Function):
    """Identity that opens a group. Its output must not be changed in place: see NOTE [ Markers ].

    Source: Megatron-LM ``FineGrainedOffloadingGroupStartFunction``.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, cpu_offload_handler: ChunkOffloadHandler, name: str
    ) -> Tensor:
        """Open group ``name`` of the chunk."""
        ctx.chunk = cpu_offload_handler
        cpu_offload_handler.on_group_start_forward(name)
        return tensor

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        """Backward leaves the group."""
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
        """Commit group ``name`` of the chunk; with ``delay_offload``, only note that."""
        ctx.group = cur_forward_chunk.commit(name, forced_released_tensors, delay=delay_offload)
        return tensor

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Backward reaches the group."""
        ctx.group.on_use()
        return grad_output[0], None, None, None, None
