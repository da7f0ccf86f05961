"""Checks that are too slow to leave on: ``OffloadConfig(verify=True)``.

What came back is compared, by checksum, with what left. And when a chunk's forward is over, every
storage that was offloaded should be gone from the device. If one is still there, offloading it was
in vain, and the log names its group and who holds it.

    group 'mlp' offloaded 4096 bytes that are still on the device: a tensor of shape (32, 32), held
    by the variable 'kept' of forward() in model.py, line 12
"""

from __future__ import annotations

import gc
import logging
import sys
import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from pp_offload._core.tensors import StorageRef, flat_bytes
from pp_offload._memory.checksum import checksum
from pp_offload._memory.storages import as_array, has_storage
from pp_offload._transfer.listeners import Listener
from pp_offload._transfer.ticket import Ticket
from pp_offload.backends import Backend
from pp_offload.errors import VerifyError

logger = logging.getLogger(__name__)

MAX_HOLDERS = 3
"""Named in one message."""


class Verifier(Listener):
    """Looks at what leaves an engine and what it gives back.

    Args:
        backend: The engine's.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._watched: list[tuple[str, int, StorageRef]] = []
        self._said: set[str] = set()

    def delivered(self, ticket: Ticket, tensor: Tensor) -> None:
        if ticket.checksum is None or self._backend.is_capturing:
            return  # in a capture nothing is there to compare
        what = f"a tensor of group '{ticket.label}' with payload shape {tuple(tensor.shape)}"
        check_same(tensor, ticket.checksum, f"{what} came back")

    def leaving(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            ticket.checksum = checksum_of(ticket.source())

    def left(self, tickets: Sequence[Ticket]) -> None:
        """Watch storages that should go."""
        for ticket in tickets:
            if ticket.storage is not None:  # others may need the storage of a view
                self._watched.append((ticket.label, ticket.nbytes, weakref.ref(ticket.storage)))

    def check_freed(self) -> list[str]:
        """Log which storages that were offloaded since the last call are still on the device.

        To be called when copies have ended and their sources were let go.

        Returns:
            The messages; each is logged once.
        """
        watched, self._watched = self._watched, []
        found = []
        for label, nbytes, ref in watched:
            storage = ref()
            if storage is not None:
                key = storage._cdata
                del storage
                found.append(_message(label, nbytes, _tensors_of(key)))
        for message in found:
            if message not in self._said:
                self._said.add(message)
                logger.warning(message)
        return found


def checksum_of(tensor: Tensor) -> int:
    """The checksum of a dense tensor's bytes; waits for the device."""
    return checksum(as_array(flat_bytes(tensor.contiguous()).cpu()))


def check_same(tensor: Tensor, expected: int, came: str) -> None:
    """Compare the checksum of a dense tensor with that of what left; waits for the device.

    Raises:
        VerifyError: It is something else. The message begins with what ``came`` where.
    """
    found = checksum_of(tensor)
    if found != expected:
        raise VerifyError(
            f"{came} with checksum {found:#018x}, expected {expected:#018x}; if nothing wrote to "
            "it unseen, as .data, numpy and some collectives do, please report this with the "
            "backend and the options in use"
        )


def _tensors_of(key: int) -> list[Tensor]:
    found = (one for one in gc.get_objects() if issubclass(type(one), Tensor))
    return [one for one in found if has_storage(one) and one.untyped_storage()._cdata == key]


def _message(label: str, nbytes: int, tensors: Sequence[Tensor]) -> str:
    said = f"group '{label}' offloaded {nbytes} bytes that are still on the device: "
    if not tensors:
        return said + "held outside Python, for instance by an operator that saved them unpacked"
    holders = [text for tensor in tensors for text in _holders(tensor, tensors)]
    shape = tuple(tensors[0].shape)
    where = ", ".join(holders[:MAX_HOLDERS]) or "a tensor without a name, such as a leaf in a graph"
    return f"{said}a tensor of shape {shape}, held by {where}"


def _holders(tensor: Tensor, ours: Sequence[Tensor]) -> Iterator[str]:
    yield from _variables(tensor)
    for referrer in gc.get_referrers(tensor):
        if isinstance(referrer, dict):
            yield from (f"'{key}' of {_owner(referrer)}" for key in _keys(referrer, tensor))
        elif isinstance(referrer, list | tuple) and referrer is not ours:
            yield f"a {type(referrer).__name__} of {len(referrer)}"


def _variables(tensor: Tensor) -> Iterator[str]:
    """Local variables that hold ``tensor``, of all that runs now, in any thread."""
    for innermost in sys._current_frames().values():
        for frame, line in traceback.walk_stack(innermost):
            code = frame.f_code
            if code.co_filename != __file__:
                where = f"{code.co_filename.rpartition('/')[2]}, line {line}"
                for name in _keys(frame.f_locals, tensor):
                    yield f"the variable '{name}' of {code.co_name}() in {where}"


def _keys(found: Mapping[Any, Any], tensor: Tensor) -> list[Any]:
    return [key for key, value in found.items() if value is tensor]


def _owner(found: dict[Any, Any]) -> str:
    for referrer in gc.get_referrers(found):
        if getattr(referrer, "__dict__", None) is found:
            return f"a {type(referrer).__name__}"
    return f"a dict of {len(found)}"
