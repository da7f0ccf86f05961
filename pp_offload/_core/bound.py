"""A number of bytes that an option gives, or that the engine chooses.

bound = Bound(config.prefetch_bytes, least=2**18)
bound.expect(nbytes)        # twice the largest group, until
bound.choose(700 * 2**20)   # somebody knows better
bound.nbytes
"""

from __future__ import annotations

from pp_offload.config import AUTO

IN_FLIGHT_BYTES = 2**29
"""How much may be on its way to the host where no option says so."""

SMALL_BYTES = 2**18
"""Below this, tensors of several groups are reloaded as one batch."""

REFILL_BYTES = 2**22
"""A reload of less costs the host more time than the link, at 50 GB/s."""


class Bound:
    """Bytes that may be under way, in one direction.

    Args:
        given: The option: bytes, which stay as they are, or :data:`AUTO`.
        least: To begin with, where it is :data:`AUTO`.

    Attributes:
        nbytes: The bound as it is now.
    """

    def __init__(self, given: int | str, least: int) -> None:
        self.nbytes = given if isinstance(given, int) else least
        self._is_auto = self._follows_groups = given == AUTO

    def expect(self, group_bytes: int) -> None:
        """Keep it at twice a group of so many bytes at least."""
        if self._follows_groups:
            self.nbytes = max(self.nbytes, 2 * group_bytes)

    def choose(self, nbytes: int) -> None:
        """From now on it is this, unless it was given."""
        if self._is_auto:
            self._follows_groups = False
            self.nbytes = nbytes


def refill_below(window_bytes: int) -> int:
    """With no more than so many bytes unused, a window is filled again.

    At once where they are large, so that copies never pause; and not for each small tensor.
    """
    return window_bytes - max(window_bytes // 8, min(window_bytes // 2, REFILL_BYTES))
