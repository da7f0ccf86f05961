"""Work in forked processes: they have what the test imported, and begin at once.

assert statuses([work, work]) == [0, 0]     # side by side
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence

LIMIT_S = 120
"""Nothing here takes a tenth of it; a process that hangs is ended by a signal."""


def statuses(works: Sequence[Callable[[], object]]) -> list[int]:
    """How a process for each of ``works`` ends: 0 if it returns; a negative number is a signal."""
    pids = [_forked(work) for work in works]  # all begin before the first is waited for
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def _forked(work: Callable[[], object]) -> int:
    """The number of a new process that does the work, and never comes back."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads: they are idle
        pid = os.fork()
    if pid == 0:
        signal.alarm(LIMIT_S)
        try:
            work()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    return pid
