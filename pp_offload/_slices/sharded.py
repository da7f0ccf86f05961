"""Whether FSDP, the first or the second, owns parameters of a model.

It puts gathered parameters in place of the shards before a forward, and takes them away after; what
copies parameters itself would copy from memory that is given up.
"""

from __future__ import annotations

from torch.nn import Module

MARK = "_is_fsdp_managed_module"
"""Both set it on every module whose parameters they own; seen in torch 2.13."""

ADVICE = (
    "expected layers that are not sharded, for a slice is copied to the device as a whole; wrap "
    "the OffloadModel in DistributedDataParallel, with gloo for tensors of the host, or do without "
    "it: fully_shard(..., offload_policy=CPUOffloadPolicy()) keeps the shards on the host"
)


def sharded_problem(model: Module) -> str | None:
    """What is wrong with a model that FSDP has been given, in whole or in part; else None."""
    names = [name or "the model" for name, one in model.named_modules() if hasattr(one, MARK)]
    if not names:
        return None
    shown = ", ".join(map(repr, names[:3])) + (" and others" if len(names) > 3 else "")
    return f"parameters of {shown} are owned by FSDP; {ADVICE}"
