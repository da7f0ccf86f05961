"""The markers of a group: nothing in forward, signals in backward.

NOTE [ Markers ]
    A marker is a hook on the autograd node that made the tensor; the graph stays as it is. An
    identity function in its place would change numbers: where a tensor is used several times, it
    changes the order in which gradients are summed, and so their last bits. It would also either
    refuse in-place operations on its output, or cut the output's history from that of its input.
    Backward reaches a group when the gradient of its output is complete. An output without a node
    gives no signal; the first unpack takes its place. That backward has left a group needs no
    signal: its last tensors were delivered, which makes room for others.

The ``...Function`` classes are the reference's; the ``fine_grained_offloading_*`` functions of
:mod:`pp_offload.interface` use the hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pp_offload.chunk import ChunkOffloadHandler
from pp_offload.tensors import tensors_in


def mark_commit(output: Any, on_backward: Callable[[], None]) -> None:
    """Call ``on_backward`` when backward reaches a tensor of ``output``, however it is nested."""
    for tensor in (output,) if isinstance(output, Tensor) else tensors_in(output):
        node = tensor.grad_fn
        if node is not None:
            node.register_prehook(lambda gradients: on_backward())


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
