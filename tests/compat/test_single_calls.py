"""Megatron's older calls one by one: a chunk driven by hand, and single tensors."""

from __future__ import annotations

import pytest
import torch
from helpers.sessions import assert_idle
from helpers.toy import same_bits
from torch import Tensor

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import GroupStateError, PipelineOffloadManager


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_groups_leave_and_come_back(
    manager: PipelineOffloadManager, by_name: bool, early: bool
) -> None:
    device = manager.backend.device
    off_interface.init_chunk_handler(None, None, 1)
    chunk = manager.cur_forward_chunk()
    assert chunk is not None and chunk is manager.pop_forward_chunk("any")
    with pytest.raises(GroupStateError, match="commit without an open group"):
        chunk.on_group_commit_forward(None)
    tags = {}
    for name in ("attn", "mlp"):
        group = chunk.on_group_start_forward(name)
        assert chunk.find_next_group(name) is group is chunk.find_next_group()
        tags[name] = [chunk.tensor_push(torch.ones(3, 3, device=device) * i) for i in range(3)]
        assert chunk.should_bulk_offload()
        if by_name:
            chunk.on_group_commit_forward(None)
        else:
            chunk.bulk_offload_group()
        assert (group.total_tensor_count, group.total_offload_bytes) == (3, 3 * 36)
    assert chunk.get_max_deduplicated_groups() == 2
    assert chunk.find_group_with_name("mlp", 1) is group
    manager.backend.synchronize()
    manager.statistics()  # lets go of sources; else they are taken back, without a reload
    if early:
        chunk.pre_reload_last_layer()
        assert not group.wanted()
    for name in ("mlp", "attn"):
        if by_name:
            chunk.on_group_commit_backward(name)
        else:
            chunk.bulk_reload_group()
        assert manager.cur_backward_chunk() is chunk
        expected = [torch.ones(3, 3) * i for i in range(3)]
        assert same_bits([chunk.tensor_pop(tag).cpu() for tag in tags.pop(name)], expected)
    assert manager.statistics().bytes_reloaded > 0
    assert_idle(manager)


def test_a_tensor_leaves_and_comes_back(manager: PipelineOffloadManager) -> None:
    off_interface.init_chunk_handler(None, None, 1)
    chunk = manager.cur_forward_chunk()
    assert chunk is not None
    values = torch.ones(3, 3, device=manager.backend.device) * 2
    leaves, stays = chunk.offload(values), chunk.offload(torch.nn.Parameter(values))
    assert manager.statistics().bytes_offloaded == values.nbytes
    for state in (leaves, leaves, stays):
        assert same_bits([chunk.reload(state).cpu()], [torch.ones(3, 3) * 2])


def test_what_a_caller_may_count_and_pool(manager: PipelineOffloadManager) -> None:
    off_interface.init_chunk_handler(None, None, 1)
    chunk = manager.cur_forward_chunk()
    assert chunk is not None and chunk.is_empty_chunk()
    group = chunk.on_group_start_forward("mlp")
    group.update_offload_info(torch.ones(4))
    group.set_duplicate_storage_info(2, 64)
    assert (group.total_tensor_count, group.total_offload_bytes) == (1, 16)
    assert (group.duplicate_storage_tensor_count, group.duplicate_storage_bytes) == (2, 64)
    backend, pool = manager.backend, manager.cpu_tensor_pool
    assert (manager.d2h_stream, manager.h2d_stream) == (backend.d2h, backend.h2d)
    host: Tensor = pool.allocate((3, 2), torch.float16)
    assert host.device.type == "cpu" and manager.cpu_tensor_pool is pool
    pool.free(host)
