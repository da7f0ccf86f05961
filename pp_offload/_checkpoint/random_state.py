"""The state of the random number generators, to go on from there again.

state = RandomState.after(outputs)  # of the operator that drew last
state.set()
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from pp_offload._common.torch_private import tree_leaves


@dataclass(frozen=True)
class RandomState:
    """The state of the generators that an operator may have drawn from."""

    host: Tensor
    device_type: str
    indices: list[int]
    """Those of the devices that the outputs are on; empty for the host."""

    on_devices: list[Tensor]

    @classmethod
    def after(cls, outputs: Any) -> RandomState:
        """The state that the operator which made ``outputs`` left."""
        first = next(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))
        indices, states = get_device_states(first)
        return cls(torch.get_rng_state(), first.device.type, indices, states)

    def set(self) -> None:
        """Have the generators go on from this state."""
        torch.set_rng_state(self.host)
        if self.indices:
            set_device_states(self.indices, self.on_devices, device_type=self.device_type)
