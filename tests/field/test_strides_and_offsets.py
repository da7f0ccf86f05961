"""F40: a view comes back with its strides and offset, for no more bytes than it or its storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import on_two_backends
from torch import Tensor
from toy import assert_idle, same_bits
from wrapped import KeepsSaved

from pp_offload import FineGrainedActivationOffloadingInterface as off_interface
from pp_offload import PipelineOffloadManager

pytestmark = [pytest.mark.field("F40"), pytest.mark.usefixtures("vectors_move")]

NUMEL = 210

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda x: x.view(14, 15).t(),
    "transpose of a part": lambda x: x.view(14, 15)[2:9, 3:8].t(),
    "every second": lambda x: x[::2],
    "every second row": lambda x: x.view(15, 14)[::2],
    "every second column": lambda x: x.view(14, 15)[:, ::2],
    "padded rows": lambda x: x.view(14, 15)[:, :12],
    "padded rows, last one whole": lambda x: x.as_strided((14, 12), (15, 1), 3),
    "offset": lambda x: x[7:],
    "offset of one": lambda x: x[1:2],
    "expand a row": lambda x: x[:30].expand(50, 30),
    "expand inside": lambda x: x.view(14, 1, 15).expand(14, 40, 15),
    "expand one element": lambda x: x[5].expand(30, 20),
    "channels last": lambda x: x.view(2, 5, 7, 3).permute(0, 3, 1, 2),
    "channels last, made so": lambda x: x.view(2, 3, 5, 7).contiguous(
        memory_format=torch.channels_last
    ),
    "part of channels last": lambda x: x.view(2, 5, 7, 3).permute(0, 3, 1, 2)[:, 1:],
    "0-d": lambda x: x[3],
    "0-d of its own": lambda x: x[3].clone(),
    "empty": lambda x: x[:0],
    "empty in the middle": lambda x: x.view(14, 15)[3:3].t(),
}


def geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device


@on_two_backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)
def test_view(
    manager: PipelineOffloadManager, make: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    device = manager.backend.device
    storage = torch.linspace(-3, 3, NUMEL).to(device, dtype)
    view = make(storage)
    expected, wanted = view.clone(), geometry(view)
    most = min(view.nbytes, view.untyped_storage().nbytes())
    manager.reset()
    manager.init_model_chunk_offload_handler(None, None, 1)
    h = torch.ones(2, device=device, requires_grad=True) * 1
    with off_interface(True, h, "core") as h:
        y = KeepsSaved.apply(h, view)
    y = off_interface.group_commit(y, name="core")
    del storage, view
    y.sum().backward()
    (seen,) = KeepsSaved.seen
    KeepsSaved.seen.clear()
    assert geometry(seen) == wanted
    assert same_bits([seen.clone()], [expected])
    moved = manager.statistics().bytes_offloaded
    assert moved <= most
    assert moved > 0 or most == 0
    assert seen.untyped_storage().nbytes() <= NUMEL * dtype.itemsize
    del seen
    assert_idle(manager)


def test_a_program_of_views(manager: PipelineOffloadManager) -> None:
    """Products of transposed, strided, padded and broadcast views, several of one storage."""
    device = manager.backend.device

    def run(is_on: bool, step: int) -> list[Tensor]:
        x = torch.linspace(-1, 1 + step, NUMEL).to(device).requires_grad_()
        if is_on:
            manager.reset()
            manager.init_model_chunk_offload_handler(None, None, 1)
        h = x * 2
        for name in "ab":
            with off_interface(is_on, h, name) as h:
                grid = h.view(14, 15)
                y = (grid.t() @ grid[:, ::2]).sum(1) * grid[3]
                y = y * h[:15] * h[::14][:15] * grid[:, :1].expand(14, 15).sin().sum(0)
                h = (grid * y).reshape(-1) * h[2].cos()
            if is_on:
                h = off_interface.group_commit(h, name=name)
        h.sum().backward()
        return [h.detach(), x.grad]

    for step in range(3):
        assert same_bits(run(True, step), run(False, step)), step
        assert_idle(manager)
