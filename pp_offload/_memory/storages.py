"""Which tensors are memory that can be addressed."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter


def has_storage(tensor: Tensor) -> bool:
    """Whether ``tensor`` is dense memory that can be addressed."""
    is_plain = type(tensor) in (Tensor, Parameter) and not tensor.is_nested
    return is_plain and tensor.layout is torch.strided
