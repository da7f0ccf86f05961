"""Host memory on a chosen NUMA node, for the moment it is asked for.

Linux gives a page from the node of the processor that first touches it. So the thread that asks for
memory moves there, touches it, and goes back to where it was. Nothing else is changed, and where
the system says nothing about its nodes, nothing at all.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from pp_offload._memory.slabs import Allocate

logger = logging.getLogger(__name__)

PAGE_BYTES = 4096


def on_node(node: int, allocate: Allocate, root: Path = Path("/")) -> Allocate:
    """``allocate``, with the memory it gives placed on a NUMA node.

    Args:
        node: As the system numbers them, from 0.
        allocate: Gives a flat ``uint8`` host tensor.
        root: Where ``sys`` is.
    """
    processors = processors_of(node, root)
    if processors:
        logger.info("host memory is placed on NUMA node %d, processors %s", node, processors)
    else:
        logger.warning(
            "numa_node is %d, but the system tells no processor of that node that this process "
            "may use; host memory is placed as usual",
            node,
        )
        return allocate

    def placed(nbytes: int) -> Tensor:
        with running_on(processors):
            data = allocate(nbytes)
            data[::PAGE_BYTES] = 0
        return data

    return placed


@contextmanager
def running_on(processors: set[int]) -> Iterator[None]:
    """Move the calling thread to these processors, and back."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, processors)
        yield
    finally:
        os.sched_setaffinity(0, before)


def processors_of(node: int, root: Path = Path("/")) -> set[int]:
    """Processors of a NUMA node that this thread may run on; empty where the system tells none."""
    try:
        text = (root / f"sys/devices/system/node/node{node}/cpulist").read_text()
        return _listed(text.strip()) & os.sched_getaffinity(0)
    except (OSError, AttributeError, ValueError):  # no such node, no such system
        return set()


def _listed(text: str) -> set[int]:
    """Of a list such as ``0-3,8``."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
