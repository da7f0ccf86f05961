"""In which pieces a payload lies in host memory, and is copied.

sizes = pieces(loan, 0, 2**20)   # nearly always one
"""

from __future__ import annotations

from pp_offload._memory.buffers import Loan


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
