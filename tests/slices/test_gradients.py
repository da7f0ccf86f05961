"""Gradients of a slice on their way to the host."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from pp_offload import OffloadConfig
from pp_offload._slices.gradients import GradientPath
from pp_offload._slices.plain_copies import PlainCopies
from pp_offload.testing import SimulatedBackend


@pytest.mark.parametrize("is_looked_at", [False, True], ids=["later", "at once"])
def test_who_sends_gradients_waits_only_where_autograd_looks_at_them_at_once(
    is_looked_at: bool,
) -> None:
    """With ``detect_anomaly`` it does. Else the thread that sends goes on with the next slice."""
    device = SimulatedBackend("late")
    path = GradientPath(PlainCopies(device, OffloadConfig()), "slice 0")
    looks: Any = torch.autograd.detect_anomaly() if is_looked_at else nullcontext()
    with device.activate():
        gradient = torch.arange(4.0)
        with looks:
            (sent,) = path.send([gradient])
        assert device.pending == (0 if is_looked_at else 1)
        path.settle()
        assert device.pending == 0 and sent is not None and torch.equal(sent, gradient)
