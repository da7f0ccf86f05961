"""What a commit takes, whatever came before it and whatever goes on beside it."""

from __future__ import annotations

import torch
from conftest import on_two_backends
from helpers.toy import same_bits
from torch import Tensor

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import (
    PipelineOffloadManager,
)
from pp_offload.backends import Backend


def leaf_on(backend: Backend) -> Tensor:
    return torch.linspace(-1, 1, 12).view(3, 4).to(backend.device).requires_grad_()


@on_two_backends
def test_a_group_that_backward_used_before_its_commit_stays(
    manager: PipelineOffloadManager,
) -> None:
    x = leaf_on(manager.backend)
    manager.init_model_chunk_offload_handler(None, None, 1)
    with off_interface(True, x * 2, "core") as h:
        y = h.sin()
        (inside,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    y = off_interface.group_commit(y, name="core")
    assert manager.statistics().bytes_offloaded == 0
    (behind,) = torch.autograd.grad(y.sum(), x)
    assert same_bits([inside], [behind])
