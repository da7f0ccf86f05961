"""The second part of a backward, in the same order in each run.

PyTorch keeps parameters, and nodes of the graph that their gradients begin at, in sets: so they
come in the order of addresses, and two runs of the same pipeline differ by some launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.distributed.pipelining import _backward


@contextmanager
def ordered_parts() -> Iterator[None]:
    """Meanwhile they come in the order of parameters, and of the graph."""
    unordered = _backward.get_param_groups

    def ordered(inputs: Any, params: Any, reverse_edges: Any) -> Any:
        nodes = {node: number for number, node in enumerate(reverse_edges)}
        numbers = {param: number for number, param in enumerate(params)}
        groups = unordered(inputs, params, reverse_edges)
        for group in groups:
            group["params"] = sorted(group["params"], key=numbers.__getitem__)
            group["intermediates"] = sorted(
                group["intermediates"], key=lambda node: nodes.get(node, -1)
            )
        return sorted(groups, key=lambda group: numbers[group["params"][0]])

    with patch.object(_backward, "get_param_groups", ordered):
        yield
