"""Empties a storage that something else keeps alive, once its bytes are on the host.

A user names tensors whose memory the forward still references but no longer needs. Their storage is
emptied only when it is certain that nobody else shares it: a saved tensor in another group, a view
in the user's hands, or anything autograd saved without hooks counts as a holder, and then it stays.
So does memory that is not torch's own, with a warning, for naming it never helps.

    offloader.after_copies(release.of(tensors))
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from pp_offload._common.checks import described
from pp_offload._common.torch_private import use_count
from pp_offload._core.tensors import Eligibility
from pp_offload._memory.storages import has_storage

logger = logging.getLogger(__name__)

_EXTERNAL = "its memory is not torch's own, or shared with other processes; do not name it"


class ForcedRelease:
    """Empties what users name, where that harms nobody."""

    def __init__(self, eligibility: Eligibility) -> None:
        self._eligibility = eligibility
        self._has_warned = False

    def of(self, tensors: Iterable[Tensor]) -> Callable[[], None]:
        """A function that empties ``tensors``, to be called after their copies; refers weakly."""
        return partial(self._run, [weakref.ref(tensor) for tensor in tensors])

    def _run(self, refs: Sequence[weakref.ref[Tensor]]) -> None:
        for ref in refs:
            tensor = ref()
            if tensor is None:
                continue
            reason = self._reason_to_stay(tensor)
            if reason is None:
                tensor.untyped_storage().resize_(0)
            else:
                is_news = reason is _EXTERNAL and not self._has_warned
                self._has_warned |= is_news
                logger.log(
                    logging.WARNING if is_news else logging.INFO,
                    "forced_released_tensors: %s stays on the device: %s",
                    described(tensor),
                    reason,
                )

    def _reason_to_stay(self, tensor: Tensor) -> str | None:
        if not has_storage(tensor):
            return "it is no dense tensor"
        if isinstance(tensor, Parameter) or tensor in self._eligibility.kept:
            return "it belongs to the model, or was marked with mark_not_offloadable"
        storage = tensor.untyped_storage()
        if not storage.resizable() or (storage.device.type == "cpu" and storage.is_shared()):
            return _EXTERNAL
        # Of its holders, ``storage`` here, the tensor, and a base are known.
        others = use_count(storage._cdata) - 2 - (tensor._base is not None)
        if others > 0:
            return f"its storage is shared by {others} others"
        if tensor._base is not None and _references_to_base(tensor) > _FROM_ITS_VIEW:
            return "it is a view, and the tensor it is a view of is in use"
        # Autograd refers to a leaf itself, without another holder of its storage; the node that
        # accumulates its gradient does so too, and reads nothing.
        is_accumulated = tensor.requires_grad and _is_leaf(tensor)
        node = get_gradient_edge(tensor).node if is_accumulated else None
        references = tensor._use_count()  # type: ignore[attr-defined]
        if references > (1 if node is None else 2):
            return "autograd has saved it outside of any group"
        return None


def _is_leaf(tensor: Tensor) -> bool:
    """Whether no operator made it. PyTorch raises where it made one of several views of what was
    changed in place since, for then the graph of that view cannot be made anew.
    """
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def _references_to_base(view: Tensor) -> int:
    base = view._base
    return sys.getrefcount(base) + base._use_count()  # type: ignore[union-attr]


_FROM_ITS_VIEW = _references_to_base(torch.empty(1, device="cpu")[:])
"""How many references are counted for a base that only its view refers to."""
