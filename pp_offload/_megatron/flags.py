"""Flags that other libraries plant on tensors which are to stay on the device.

Transformer Engine and Megatron-LM set an attribute on a tensor, and look at it when autograd saves
that very tensor. Here the flag is read at the same moment, and from then on holds for the storage:
while a flagged tensor lives, its memory is taken, so sending a view of it away would free nothing.

    if is_flagged(tensor):
        kept.add(tensor)
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import Parameter

FLAGS = ("_TE_do_not_offload", "_do_not_offload")
"""Of Transformer Engine and of Megatron-LM; set to something true."""


def is_flagged(tensor: Tensor) -> bool:
    """Whether ``tensor``, or one of those that a quantized one is made of, is flagged.

    Source: Megatron-LM ``ChunkOffloadHandler.tensor_need_offloading_checker``. What a quantized
    tensor of Transformer Engine is made of is told by its ``get_data_tensors``.
    """
    if _has_flag(tensor):
        return True
    if type(tensor) in (Tensor, Parameter):
        return False
    ask = getattr(tensor, "get_data_tensors", None)
    return ask is not None and any(map(_has_flag, ask()))


def _has_flag(tensor: object) -> bool:
    return any(getattr(tensor, name, False) for name in FLAGS)
