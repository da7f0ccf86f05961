"""Device memory of a virtual device is what the storages alive take."""

from __future__ import annotations

import torch
from torch import Tensor

from pp_offload.simulate.memory import ROUNDING_BYTES, DeviceMemory


def tensor(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")


def test_storages_count_once_while_they_live_and_as_large_as_they_are() -> None:
    memory = DeviceMemory()
    first, other = tensor(4096), tensor(1)
    for each in (first, other, first):
        memory.see(each.untyped_storage())
    assert memory.live_bytes == memory.peak_bytes == 4096 + ROUNDING_BYTES
    del first, each
    assert memory.live_bytes == ROUNDING_BYTES
    assert memory.take_peak() == 4096 + ROUNDING_BYTES
    assert memory.peak_bytes == ROUNDING_BYTES, "from then on"
    for nbytes in (8192, 512):
        other.untyped_storage().resize_(nbytes)
        memory.see(other.untyped_storage())
        assert memory.live_bytes == nbytes
    assert memory.peak_bytes == 8192
