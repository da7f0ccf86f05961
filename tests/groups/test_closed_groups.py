"""What happens at the end of a group: who is told, what the chunk says before, which one it is."""

from __future__ import annotations

import pytest
import torch
from conftest import on_two_backends
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import PipelineOffloadManager
from pp_offload._core.group import Group, GroupState
from pp_offload._core.observer import Observer
from pp_offload._core.payloads import Payloads
from pp_offload._megatron.chunk import ChunkOffloadHandler


class Closed(Observer):
    """Names of groups that were opened, and that were closed."""

    def __init__(self, manager: PipelineOffloadManager) -> None:
        self.names_opened: list[str] = []
        self.names: list[str] = []
        manager.offloader.observers.add(self)

    def opened(self, group: Group) -> None:
        self.names_opened.append(group.name)

    def closed(self, group: Group, payloads: Payloads | None) -> None:
        self.names.append(group.name)


def chunk_of(manager: PipelineOffloadManager) -> ChunkOffloadHandler:
    off_interface.init_chunk_handler(None, None, 1)
    chunk = manager.forward.chunk
    assert isinstance(chunk, ChunkOffloadHandler)
    return chunk


def layer(x: Tensor, name: str) -> Tensor:
    with off_interface(True, x, name) as x:
        y = x.sin().cos()
    return off_interface.group_commit(y, name=name)


@on_two_backends
def test_each_group_that_opens_is_told_to_close(manager: PipelineOffloadManager) -> None:
    """Also where operators are recorded, and where a user of the reference has it leave."""
    closed, chunk = Closed(manager), chunk_of(manager)
    x = torch.linspace(0, 1, 16).view(4, 4).to(manager.backend.device).requires_grad_()
    make_fx(lambda x: torch.autograd.grad(layer(x, "recorded").sum(), x)[0])(x)
    group = chunk.on_group_start_forward("sent")
    group.pack(x * 1)
    chunk.bulk_offload_group()
    chunk.on_group_start_forward("kept")
    chunk.on_group_commit_forward(None)
    assert closed.names_opened == closed.names == ["recorded", "sent", "kept"]


@on_two_backends
@pytest.mark.parametrize("is_inner_left_out", [False, True])
def test_offload_switched_inside_a_group_of_the_same_name(
    is_inner_left_out: bool, manager: PipelineOffloadManager
) -> None:
    """The inner commit is the inner group's, and the outer one's is the outer group's."""
    chunk = chunk_of(manager)
    x = torch.ones(4, 4).to(manager.backend.device).requires_grad_()
    switches = [manager.disable_offload, manager.enable_offload]
    first, second = reversed(switches) if is_inner_left_out else switches
    first()
    outer = off_interface(True, x, "a")
    with outer:
        second()
        inner = off_interface(True, x, "a")
        with inner:
            y = x.sin()
        manager.enable_offload()
        off_interface.group_commit(y, name="a")
        states = [group.state for group in chunk.groups]
        assert states == [GroupState.OPEN if is_inner_left_out else GroupState.OFFLOADED]
    off_interface.group_commit(y, name="a")
    assert not chunk.open_groups
    assert all(group.state is not GroupState.OPEN for group in chunk.groups)
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, x.detach().cos())
