"""Device memory of a virtual device is what the storages alive take."""

from __future__ import annotations

import torch

from pp_offload.simulate.memory import ROUNDING_BYTES, DeviceMemory


def storage(nbytes: int) -> torch.UntypedStorage:
    return torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()


def test_storages_count_while_they_live_and_once() -> None:
    memory = DeviceMemory()
    one, other = storage(4096), storage(1)
    for each in (one, other, one):
        memory.see(each)
    assert memory.live_bytes == memory.peak_bytes == 4096 + ROUNDING_BYTES
    del one, each
    assert memory.live_bytes == ROUNDING_BYTES
    assert memory.take_peak() == 4096 + ROUNDING_BYTES
    assert memory.peak_bytes == ROUNDING_BYTES, "from then on"


def test_memory_that_is_free_is_not_in_the_next_peak() -> None:
    memory = DeviceMemory()
    for _ in range(3):
        memory.see(storage(4096))
    assert memory.peak_bytes == 4096


def test_a_storage_that_was_resized_counts_as_it_is() -> None:
    memory = DeviceMemory()
    one = storage(4096)
    memory.see(one)
    one.resize_(512)
    memory.see(one)
    assert memory.live_bytes == 512
    one.resize_(8192)
    memory.see(one)
    assert memory.live_bytes == memory.peak_bytes == 8192
