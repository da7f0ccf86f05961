"""What the README shows runs as it stands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pp_offload import CpuBackend, PipelineOffloadManager, use_backend
from pp_offload import FineGrainedActivationOffloadingInterface as off_interface

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(1024, 1024)
        self.mlp = nn.Sequential(nn.Linear(1024, 1024), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x + self.attn(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_there_are_as_many_examples_as_tests() -> None:
    assert len(BLOCKS) == 2


def test_the_ten_lines_are_ten_and_run(alone: None, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in BLOCKS[0].splitlines() if line]
    assert len(lines) <= 12
    x = torch.randn(8 * 1024, 1024)
    names = {
        "model": Model(),
        "rank": 0,
        "num_stages": 1,
        "device": torch.device("cpu"),
        "loss_fn": nn.functional.mse_loss,
        "data": [(x, x), (x, x)],
    }
    with use_backend(CpuBackend()):
        exec(BLOCKS[0], names)
        assert PipelineOffloadManager.get_instance().statistics().bytes_offloaded > 0
    printed = capsys.readouterr().out
    assert "attn" in printed and "mlp" in printed


def test_the_markers_run() -> None:
    layer: Any = Layer()
    layer.offload_mlp = True
    x = torch.randn(2048, 1024, requires_grad=True)
    with use_backend(CpuBackend()) as manager:
        off_interface.reset()
        off_interface.init_chunk_handler(None, None, 1024 * 1024)
        names = {"self": layer, "x": x}
        exec(BLOCKS[1], names)
        assert manager.statistics().bytes_offloaded > 0
        names["y"].sum().backward()
    assert x.grad is not None
