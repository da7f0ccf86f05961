"""Emptying a storage that something else keeps alive, once its bytes are on the host.

A user names tensors whose memory the forward still references but no longer needs. Their storage is
emptied only when it is certain that nobody else shares it: a saved tensor in another group, a view
in the user's hands, or anything autograd saved without hooks counts as a holder, and then it stays.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable

from torch import Tensor

from pp_offload.tensors import num_holders

logger = logging.getLogger(__name__)


class ForcedRelease:
    """Tensors to empty after the copies queued so far.

    Args:
        tensors: What the user named. Held weakly.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = [weakref.ref(tensor) for tensor in tensors]

    def run(self) -> None:
        """Empty what may be emptied. The copies are done and dropped their references."""
        for ref in self._tensors:
            tensor = ref()
            if tensor is not None and _may_be_emptied(tensor):
                tensor.untyped_storage().resize_(0)


def _may_be_emptied(tensor: Tensor) -> bool:
    storage = tensor.untyped_storage()
    if not storage.resizable():
        logger.warning(
            "forced_released_tensors: a tensor of shape %s has a storage that cannot be resized "
            "(external memory); its data stays on the device",
            tuple(tensor.shape),
        )
        return False
    expected = 1 + (tensor._base is not None)
    holders = num_holders(storage)
    if holders > expected:
        logger.info(
            "forced_released_tensors: the storage of a tensor of shape %s is shared by %d others; "
            "it stays on the device",
            tuple(tensor.shape),
            holders - expected,
        )
    return holders <= expected
