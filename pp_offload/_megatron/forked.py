"""A forked process gets a manager of its own, with the same options, when it first asks for one.

The parent's manager has copies under way, by threads that do not exist here, and perhaps a file
that both processes have open. It is not used here: what was saved through it raises
:class:`~pp_offload.errors.ForkedError`, which names both processes. It is kept all the same, or
destructors would wait for those copies. A process that only loads data never asks for a manager.
"""

from __future__ import annotations

import os

from pp_offload._megatron.manager import PipelineOffloadManager


def _after_fork() -> None:
    old = PipelineOffloadManager.OFFLOAD_MGR
    if old is not None:
        PipelineOffloadManager.INHERITED = old
        PipelineOffloadManager.OFFLOAD_MGR = None


os.register_at_fork(after_in_child=_after_fork)
