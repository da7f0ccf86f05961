"""The lists of weights that RNNs of PyTorch keep beside their parameters.

An RNN computes with its list. It makes a new one of what stands in the places of its parameters
when that is not what it knows, and keeps the list: tensors on the device would stay in it after the
forward. With cuDNN it also gives tensors of a new list other memory, in place. So it gets a list
for as long as they stand there, in which it finds nothing new, and its own one back.

    for name, now in lists_now(rnn):  # while tensors stand in the places of parameters
        ...
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch.nn import Module, RNNBase


def rnns_in(module: Module) -> list[RNNBase]:
    """Those that have such lists."""
    return [one for one in module.modules() if isinstance(one, RNNBase)]


def lists_now(rnn: RNNBase) -> Iterator[tuple[str, list[Any]]]:
    """Its lists, by the attributes they are, of what stands in the places of its parameters now.

    What is no parameter, as where a parametrization makes it, is left to the RNN.
    """
    weights, refs = list(rnn._flat_weights), list(rnn._flat_weight_refs)
    for i, name in enumerate(rnn._flat_weights_names):
        tensor = rnn._parameters.get(name)
        if tensor is not None:
            weights[i], refs[i] = tensor, weakref.ref(tensor)
    yield "_flat_weights", weights
    yield "_flat_weight_refs", refs
