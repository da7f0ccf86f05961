"""Checks that are too slow to leave on: ``OffloadConfig(verify=True)``.

Each payload that comes back must have the checksum that it left with. And when a chunk's forward is
over, every offloaded storage should be freed. If a storage is still on the device, its offload was
in vain, and a warning names its group and its holders.

    group 'mlp' offloaded 4096 bytes that are still on the device: a tensor of shape (32, 32), held
    by the variable 'kept' of forward() in model.py, line 12
"""

from __future__ import annotations

import gc
import sys
import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, UntypedStorage

from pp_offload._common.processes import logger_of, warn_once
from pp_offload._core.batch import Batch
from pp_offload._core.geometry import flat_bytes
from pp_offload._core.payloads import Payloads
from pp_offload._memory.addresses import as_array, checksum, has_storage
from pp_offload.errors import VerifyError

logger = logger_of(__name__)

MAX_HOLDERS = 3  # named in one message


class Verifier:
    """Compares checksums of batches, and finds offloaded storages that were not freed."""

    def __init__(self) -> None:
        self._watched: list[tuple[str, int, weakref.ref[UntypedStorage]]] = []

    def leaves(self, batch: Batch, payloads: Payloads) -> None:
        """Take checksums of payloads that are about to leave; waits for the device."""
        batch.back.checksums = [checksum_of(tensor) for tensor in payloads.tensors]
        for storage, nbytes in zip(payloads.storages, payloads.sizes, strict=True):
            if storage is not None:  # other tensors may need the storage of a view
                self._watched.append((batch.label, nbytes, weakref.ref(storage)))

    @staticmethod
    def came(batch: Batch, index: int, tensor: Tensor) -> None:
        """Compare a delivered payload; waits for the device. Raises a VerifyError if it differs."""
        if batch.back.checksums:
            what = f"a tensor of group '{batch.label}' with payload shape {tuple(tensor.shape)}"
            check_same(tensor, batch.back.checksums[index], f"{what} came back")

    def check_freed(self) -> list[str]:
        """Return messages on storages that were offloaded since the last call and not freed; each
        is logged once. To be called when copies have ended and their sources were let go.
        """
        watched, self._watched = self._watched, []
        messages = []
        for label, nbytes, ref in watched:
            if (storage := ref()) is not None:
                key = storage._cdata
                del storage
                messages.append(_message(label, nbytes, key))
        for message in messages:
            warn_once(logger, self, message)
        return messages


def checksum_of(tensor: Tensor) -> int:
    """Return the checksum of a dense tensor's bytes; waits for the device."""
    return checksum(as_array(flat_bytes(tensor.contiguous()).cpu()))


def check_same(tensor: Tensor, expected: int, came: str) -> None:
    """Raise a VerifyError, whose message begins with ``came``, if the checksum of a dense tensor is
    not ``expected``. Waits for the device.
    """
    actual = checksum_of(tensor)
    if actual != expected:
        raise VerifyError(
            f"{came} with checksum {actual:#018x}, expected {expected:#018x}; if nothing wrote to "
            "it unseen, as .data, numpy and some collectives do, please report this with the "
            "backend and the options in use"
        )


def _message(label: str, nbytes: int, key: int) -> str:
    tensors = [t for t in gc.get_objects() if has_storage(t) and t.untyped_storage()._cdata == key]
    text = f"group '{label}' offloaded {nbytes} bytes that are still on the device: "
    if not tensors:
        return text + "held outside Python, for instance by an operator that saved them unpacked"
    holders = [holder for tensor in tensors for holder in _holders(tensor, tensors)]
    shape = tuple(tensors[0].shape)
    where = ", ".join(holders[:MAX_HOLDERS]) or "a tensor without a name, such as a leaf in a graph"
    return f"{text}a tensor of shape {shape}, held by {where}"


def _holders(tensor: Tensor, tensors: Sequence[Tensor]) -> Iterator[str]:
    yield from _variables(tensor)
    for referrer in gc.get_referrers(tensor):
        if isinstance(referrer, dict):
            yield from (f"'{key}' of {_owner(referrer)}" for key in _keys(referrer, tensor))
        elif isinstance(referrer, list | tuple) and referrer is not tensors:
            yield f"a {type(referrer).__name__} of {len(referrer)}"


def _variables(tensor: Tensor) -> Iterator[str]:
    """Yield local variables that hold ``tensor``, of all running frames in any thread."""
    for innermost in sys._current_frames().values():
        for frame, line in traceback.walk_stack(innermost):
            code = frame.f_code
            if code.co_filename != __file__:
                where = f"{code.co_filename.rpartition('/')[2]}, line {line}"
                for name in _keys(frame.f_locals, tensor):
                    yield f"the variable '{name}' of {code.co_name}() in {where}"


def _keys(items: Mapping[Any, Any], tensor: Tensor) -> list[Any]:
    return [key for key, value in items.items() if value is tensor]


def _owner(attributes: dict[Any, Any]) -> str:
    for referrer in gc.get_referrers(attributes):
        if getattr(referrer, "__dict__", None) is attributes:
            return f"a {type(referrer).__name__}"
    return f"a dict of {len(attributes)}"
