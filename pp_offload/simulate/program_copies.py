"""Copies that the program itself makes between device and host, as ``x.cpu()`` does.

Such a copy runs on the compute stream and takes the link. The host waits for it, unless it is
``non_blocking``.

    if func in COPIES and (found := program_copy(func, args, kwargs)) is not None:
        device.launch_copy(stream, found.nbytes, to_host=found.to_host)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

COPIES = (aten._to_copy.default, aten.copy_.default)
"""The operators that may go from one to the other."""


@dataclass(frozen=True)
class ProgramCopy:
    """One copy over the link."""

    output: Tensor
    """What the operator returns. On the host it holds no data."""

    nbytes: int
    """That go over the link."""

    to_host: bool
    """Else to the device."""

    is_waited_for: bool
    """Whether the host goes on only when it has ended."""


def program_copy(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ProgramCopy | None:
    """Do as the operator does, without its data; None if nothing goes over the link.

    Args:
        func: One of :data:`COPIES`.
        args, kwargs: What it was called with.
    """
    if func is COPIES[0]:
        source, waits = args[0], not kwargs.get("non_blocking", False)
        device = kwargs.get("device") or source.device
        if (device.type == "meta") == source.is_meta:
            return None
        like = func(source, **{**kwargs, "device": torch.device("meta")})
        output = like if not source.is_meta else _on_host(like)
    else:
        output, source = args[:2]
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if output.is_meta == source.is_meta:
            return None
    return ProgramCopy(output, source.nbytes, source.is_meta, waits)


def _on_host(like: Tensor) -> Tensor:
    """Memory that nobody touches, so that little is behind it."""
    return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="cpu")
