"""Empty storages that the program keeps alive, once their bytes are on the host.

A user names tensors whose memory the forward still references but no longer needs. A storage is
emptied only when nothing else can share it: a saved tensor of another group, a view in the user's
hands, or a tensor that autograd saved without hooks counts as a holder, and then the storage stays.
Memory that is not torch's own stays as well, with a warning, because naming it never helps.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from pp_offload._common.checks import described
from pp_offload._common.processes import logger_of, warn_once
from pp_offload._common.torch_private import use_count
from pp_offload._core.eligibility import StorageSet, is_marked
from pp_offload._memory.addresses import has_storage

logger = logger_of(__name__)

_EXTERNAL = "its memory is not torch's own, or shared with other processes; do not name it"


def release(refs: Sequence[weakref.ref[Tensor]], resident: StorageSet) -> None:
    """Empty the storages of those tensors that are alive and that nothing else needs. References
    are weak, because a pending copy must not keep tensors alive.
    """
    for ref in refs:
        tensor = ref()
        if tensor is None:
            continue
        reason = _reason_to_stay(tensor, resident)
        if reason is None:
            tensor.untyped_storage().resize_(0)
            continue
        text = "forced_released_tensors: %s stays on the device: %s"
        if reason is _EXTERNAL:
            warn_once(logger, resident, text, described(tensor), reason)
        else:
            logger.info(text, described(tensor), reason)


def _reason_to_stay(tensor: Tensor, resident: StorageSet) -> str | None:
    if not has_storage(tensor):
        return "it is no dense tensor"
    if isinstance(tensor, Parameter) or tensor in resident or is_marked(tensor):
        return "it belongs to the model, or is marked, as by mark_not_offloadable"
    if _references_to_storage(tensor) > _FROM_ITS_TENSOR:
        return "its storage is in use by itself"
    storage = tensor.untyped_storage()
    if not storage.resizable() or (storage.device.type == "cpu" and storage.is_shared()):
        return _EXTERNAL
    # Without three known holders: ``storage`` here, the tensor, and a base.
    num_holders = use_count(storage._cdata) - 2 - (tensor._base is not None)
    if num_holders > 0:
        return f"its storage is shared by {num_holders} others"
    if tensor._base is not None and _references_to_base(tensor) > _FROM_ITS_VIEW:
        return "it is a view, and the tensor it is a view of is in use"
    # Autograd refers to a leaf itself, without another holder of its storage. So does the node that
    # accumulates its gradient, which reads nothing.
    is_accumulated = tensor.requires_grad and _is_leaf(tensor)
    node = get_gradient_edge(tensor).node if is_accumulated else None
    references = tensor._use_count()  # type: ignore[attr-defined]
    if references > (1 if node is None else 2):
        return "autograd has saved it outside of any group"
    return None


def _is_leaf(tensor: Tensor) -> bool:
    """Whether no operator made the tensor. PyTorch raises for one of several views of a tensor that
    was changed in place since, because the graph of that view cannot be made anew.
    """
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def _references_to_base(view: Tensor) -> int:
    base = view._base
    return sys.getrefcount(base) + base._use_count()  # type: ignore[union-attr]


def _references_to_storage(tensor: Tensor) -> int:
    return sys.getrefcount(tensor.untyped_storage())


_FROM_ITS_TENSOR = _references_to_storage(torch.empty(1, device="cpu"))
"""References counted for a storage that only its tensor refers to."""

_FROM_ITS_VIEW = _references_to_base(torch.empty(1, device="cpu")[:])
"""References counted for a base that only its view refers to."""
