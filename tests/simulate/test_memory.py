"""Device memory of a virtual device is what the storages alive take, by what it is for."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import PipelineOffloadManager, use_backend
from pp_offload.simulate import DEVICES, VirtualBackend
from pp_offload.simulate.memory import CATEGORIES, ROUNDING_BYTES, DeviceMemory


def tensor(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")


def only(**expected: int) -> dict[str, int]:
    """Of all categories; the others have nothing."""
    return {name: expected.get(name.replace(" ", "_"), 0) for name in CATEGORIES}


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


def test_named_memory_counts_as_what_it_is_for_until_it_is_free() -> None:
    memory = DeviceMemory()
    first, other = tensor(4096), tensor(512)
    memory.see(other.untyped_storage())
    memory.name(first[:10], "parameters")
    assert memory.live == only(parameters=4096, other=512), "all of its storage"
    assert memory.at_peak == only(other=4608), "by the names given until then"
    memory.name(first, "optimizer")
    memory.name(first, "in flight", only_unnamed=True)
    memory.name(other, "in flight", only_unnamed=True)
    assert memory.live == only(optimizer=4096, in_flight=512), "a name stays"
    del first
    assert memory.take_peak() == 4608
    assert memory.at_peak == memory.live == only(in_flight=512)
    again = tensor(4096)
    memory.see(again.untyped_storage())
    assert memory.live == only(other=4096, in_flight=512), "memory used again has no name"


def test_a_step_of_training_by_category() -> None:
    backend = VirtualBackend(DEVICES["H100"])
    with backend.activate():
        model = nn.Linear(1024, 1024, bias=False, device="meta")
        optimizer = torch.optim.Adam(model.parameters(), foreach=True)
        backend.memory.follow(model, optimizer)
        nbytes = 1024 * 1024 * 4
        assert backend.memory.live == only(parameters=nbytes)
        y = model(tensor(1024).float())
        y.backward(torch.empty_like(y))
        assert backend.memory.live["gradients"] == nbytes
        optimizer.step()
        live = backend.memory.live
        assert 0 <= live["optimizer"] - 2 * nbytes <= ROUNDING_BYTES, "and the number of steps"
        optimizer.zero_grad()
        assert backend.memory.live["gradients"] == 0
    assert sum(backend.memory.at_peak.values()) == backend.memory.peak_bytes


def test_what_the_engine_moves_has_names() -> None:
    backend = VirtualBackend(DEVICES["H100"])
    nbytes = 2**20 * 4
    with use_backend(backend):
        off_interface.init_chunk_handler(None, None, 1)
        x = torch.empty(2**20, device="meta", requires_grad=True)
        with off_interface(True, x, "g"):
            y = x.sin().cos()
        y = off_interface.group_commit(y, name="g")
        live = backend.memory.live
        assert live == only(in_flight=2 * nbytes, other=nbytes), "x, too, which the program holds"
        backend.synchronize()
        PipelineOffloadManager.get_instance().statistics()
        y.backward(torch.empty_like(y))
        assert backend.memory.at_peak["reloaded"] >= nbytes
        assert sum(backend.memory.live.values()) == backend.memory.live_bytes
