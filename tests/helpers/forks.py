"""Work in a forked process: it has what the test imported, and begins at once.

assert status_of(work) == 0
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable

LIMIT_S = 120
"""Nothing here takes a tenth of it; a process that hangs is ended by a signal."""


def status_of(work: Callable[[], object]) -> int:
    """How a process of its own ends: 0 if ``work`` returns; a negative number is a signal."""
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
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
