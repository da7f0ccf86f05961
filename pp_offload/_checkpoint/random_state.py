"""Where the generators of random numbers stand, to begin there again.

state = RandomState.after(outputs)  # of the operator that drew last
state.set()
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class RandomState:
    """Of the generators that an operator may have drawn from."""

    host: Tensor
    device: torch.device
    on_device: Tensor | None

    @classmethod
    def after(cls, outputs: Any) -> RandomState:
        """As the operator that made these left it."""
        device = next(leaf.device for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))
        module = None if device.type == "cpu" else torch.get_device_module(device)
        on_device = None if module is None else module.get_rng_state(device)
        return cls(torch.get_rng_state(), device, on_device)

    def set(self) -> None:
        """Draw from here on."""
        torch.set_rng_state(self.host)
        if self.on_device is not None:
            torch.get_device_module(self.device).set_rng_state(self.on_device, self.device)
