"""Where payloads lie in host memory: the engine's own allocator, over memory without bytes.

Where no range is long enough, a payload lies in several pieces, and is copied in as many.

    places = HostPlaces(limit_bytes=2**30)
    loan = places.allocate(2**20)    # or raises MemoryError
    sizes = pieces(loan, 0, 2**20)   # nearly always one
"""

from __future__ import annotations

import copy
from contextlib import nullcontext

import torch
from torch import Tensor

from pp_offload._memory.budget import UNLIMITED, HostBudget, as_another_process
from pp_offload._memory.buffers import Loan
from pp_offload._memory.host import HostMemory
from pp_offload._memory.unfinished import when_finished


class HostPlaces:
    """Host memory of one rank, over all its steps.

    Args:
        limit_bytes: What the rank may take; None for no limit.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._budget = _budget(UNLIMITED if limit_bytes is None else limit_bytes)
        self._memory = HostMemory(_no_bytes, self._budget)

    def allocate(self, nbytes: int) -> Loan:
        """Room for as long as anybody refers to it.

        Raises:
            MemoryError: It would be over the limit.
        """
        return self._memory.allocate(nbytes)

    def compact(self) -> None:
        """Between steps; see :meth:`HostMemory.compact`. All that nobody has is free then."""
        when_finished(nullcontext(), self._memory.compact)
        self._memory.bytes_in_use()  # as for a rank whose statistics are asked for

    def copied(self) -> HostPlaces:
        """Another one in the same state. To be called between steps, when nobody has anything."""
        other = copy.copy(self)
        other._budget = _budget(self._budget.limit_bytes)
        other._memory = copy.deepcopy(self._memory, {id(self._budget): other._budget})
        other._memory.count_in(other._budget)
        return other

    @property
    def peak_bytes(self) -> int:
        """The most that was taken at a time."""
        return self._memory.statistics().peak


def _budget(limit_bytes: int) -> HostBudget:
    with as_another_process():  # whose budget is not this one's
        return HostBudget(limit_bytes)


def pieces(loan: Loan, begin: int, nbytes: int) -> list[int]:
    """The sizes of the pieces in which a payload lies."""
    buffer = loan.buffer
    if len(buffer.ranges) == 1:
        return [nbytes]
    found: list[int] = []
    left = buffer.nbytes  # the last range may be longer than what is left for it
    for one in buffer.ranges:
        piece = min(left, one.nbytes)
        left -= piece
        if begin < piece and nbytes > 0:
            found.append(min(nbytes, piece - begin))
            nbytes -= found[-1]
        begin = max(0, begin - piece)
    return found


def _no_bytes(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")
