"""Remembers that a write to disk failed, and warns of it.

NOTE [ When the disk fails ]
    What could not be written stays where it is, tensor or buffer, and later groups stay on the
    device until the next step tries again. A payload that cannot be read back raises when it is
    asked for; asked for again, it is read again.

    failures.check()        # before room is taken
    failures.note(failure)  # something could not be written
    failures.forget()       # between steps
"""

from __future__ import annotations

import logging

from pp_offload.errors import DiskTierError

logger = logging.getLogger(__name__)


class DiskFailures:
    """The last failed write since the step began."""

    def __init__(self) -> None:
        self._failure: DiskTierError | None = None
        self._has_warned = False

    def check(self) -> None:
        """Raise MemoryError if the disk failed in this step."""
        if self._failure is not None:
            raise MemoryError(str(self._failure)) from self._failure

    def note(self, failure: DiskTierError) -> None:
        """Remember a failed write, with a warning for the first."""
        self._failure = failure
        logger.log(
            logging.DEBUG if self._has_warned else logging.WARNING,
            "offloaded activations could not be written and stay in memory, as will what follows "
            "in this step; from now on without a warning: %s",
            failure,
        )
        self._has_warned = True

    def forget(self) -> None:
        """Forget the failure, so that the next step tries again."""
        self._failure = None
